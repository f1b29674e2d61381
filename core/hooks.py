"""The hooks a plugin can implement. They run at start-up only; nothing here is on the path of a step."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import typer

    from engine.core.engine import Engine

PROJECT = "engine"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Register(Protocol):
    """The callback a register hook is given: call it once an implementation."""

    def __call__(self, name: str, loader: Callable[[], type], *, api: str, summary: str, preference: int = 0) -> None:
        """Offer an implementation under `name`.

        loader: imports and returns the class; called only when it is selected or considered by "auto".
        api: version of the contract it was written for.
        summary: one line for `engine plugins list`.
        preference: a whole number; above 0, "auto" considers it, highest first; 0: used only when named.

        Raises PluginError for what cannot be offered, which takes all that the plugin offers with it.
        """


def lazy(path: str) -> Callable[[], type]:
    """A loader for "module:Class" that imports the module when called. Raises ValueError for a path without both."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f'lazy({path!r}) does not name a class; write it as "module:Class"')

    def load() -> type:
        found: Any = getattr(import_module(module), name)
        if not isinstance(found, type):
            raise TypeError(f"{path} is {found!r}, not a class")
        return found

    return load


@hookspec
def register_attention(register: Register) -> None:
    """Offer attention backends (engine.core.attention.AttentionBackend)."""


@hookspec
def register_quant(register: Register) -> None:
    """Offer quantization methods (engine.core.quant.QuantMethod)."""


@hookspec
def register_schedulers(register: Register) -> None:
    """Offer scheduling policies (engine.core.schedulers.SchedulingPolicy)."""


@hookspec
def register_executors(register: Register) -> None:
    """Offer executors (engine.core.executors.Executor)."""


@hookspec
def register_models(register: Register) -> None:
    """Offer model architectures (engine.core.models.Model)."""


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the `engine` command line."""


@hookspec
def engine_started(engine: Engine) -> None:
    """The engine is loaded and about to take its first request."""


@hookspec
def engine_stopped(engine: Engine) -> None:
    """The engine has shut down."""
