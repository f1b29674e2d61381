"""The runner: starts one rank of a model and runs its steps on a device."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.runner.memory import (
        DTYPE_BYTES as DTYPE_BYTES,
        MEMORY_SHARE as MEMORY_SHARE,
        format_bytes as format_bytes,
    )
    from engine.core.runner.runner import Runner as Runner

__getattr__, __dir__, __all__ = exports(
    __name__,
    memory=(
        "DTYPE_BYTES",
        "MEMORY_SHARE",
        "format_bytes",
    ),
    runner=("Runner",),
)
