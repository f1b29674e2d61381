"""The contracts, and the engine that needs nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "engine.core":
    raise ImportError(
        "import this package as engine.core (pip install -e . maps it); a second copy would duplicate every class"
    )

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.engine import Engine
    from engine.core.generation import Completion
    from engine.core.types import Output, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Output", "Request", "SamplingParams"]

_HOMES = {
    "Completion": "generation",
    "Engine": "engine",
    "EngineConfig": "config",
    "Output": "types",
    "Request": "types",
    "SamplingParams": "types",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the engine needs torch, and most commands do not need the engine."""
    if name in _HOMES:
        return getattr(import_module(f"engine.core.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
