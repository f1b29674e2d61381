"""The contracts that plugins implement, and the engine. One folder per topic; its `__init__` lists the public names."""

from typing import TYPE_CHECKING

if __name__ != "engine.core":
    raise ImportError(
        "import this package as engine.core (pip install -e . makes that name); under another name every class would "
        "exist twice"
    )

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig as EngineConfig
    from engine.core.engine import Engine as Engine
    from engine.core.generation import Completion as Completion
    from engine.core.grammars import Grammar as Grammar
    from engine.core.types import Output as Output, Request as Request, SamplingParams as SamplingParams

__getattr__, __dir__, __all__ = exports(
    __name__,
    config=("EngineConfig",),
    engine=("Engine",),
    generation=("Completion",),
    grammars=("Grammar",),
    types=("Output", "Request", "SamplingParams"),
)
