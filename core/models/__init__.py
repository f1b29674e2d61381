"""Models: the contract of an architecture, and the arguments of a forward pass."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.models.base import (
        KVShape as KVShape,
        Model as Model,
        ModelSpec as ModelSpec,
        StateShape as StateShape,
    )
    from engine.core.models.forward_pass import ForwardPass as ForwardPass

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "KVShape",
        "Model",
        "ModelSpec",
        "StateShape",
    ),
    forward_pass=("ForwardPass",),
)
