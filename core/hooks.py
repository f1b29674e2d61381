"""The hooks a plugin can implement. They are called while an engine starts or stops, never during a step.

The register hooks are called once per process, when its plugins are loaded: in every command that needs plugins, in the
engine process and in each worker. They must return None. An exception makes the plugin fail to load: nothing of the
plugin is registered, one warning is logged, and an error follows only if the configuration selects something that the
plugin offers. For a plugin passed in from Python the exception is raised immediately, as a PluginError.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import typer

    from engine.core.engine import Engine
    from engine.core.protocols.routes import Routes

PROJECT = "engine"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of a plugin's function: it implements the hook of its name."""


class Register(Protocol):
    """The callback passed to a register hook, to be called once per implementation."""

    def __call__(
        self,
        name: str,
        loader: Callable[[], type],
        *,
        api: str,
        summary: str,
        preference: int = 0,
        fallback: bool = False,
    ) -> None:
        """Offer an implementation under `name`.

        name: any non-empty string other than "auto", without a comma.
        loader: imports and returns the class; called only when the implementation is selected or "auto" considers it.
        api: version of the contract that the class implements.
        summary: one line for `engine plugins list`.
        preference: a whole number. "auto" considers implementations above 0, highest first; 0: used only when named.
        fallback: "auto" considers the implementation after all others, those of other plugins included.

        Raises PluginError for an invalid argument or a name that is taken. Unless the hook catches it, the plugin fails
        to load, and nothing of it is registered.
        """


def lazy(path: str) -> Callable[[], type]:
    """A loader that imports "module:Class" when called. Raises ValueError unless `path` names both."""
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
    """Register attention backends (engine.core.attention.AttentionBackend): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_quant(register: Register) -> None:
    """Register quantization methods (engine.core.quant.QuantMethod): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_schedulers(register: Register) -> None:
    """Register scheduling policies (engine.core.schedulers.SchedulingPolicy): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_executors(register: Register) -> None:
    """Register executors (engine.core.executors.Executor): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_models(register: Register) -> None:
    """Register model architectures (engine.core.models.Model): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_parsers(register: Register) -> None:
    """Register output parsers (engine.core.parsers.Parser): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_grammars(register: Register) -> None:
    """Register grammar backends (engine.core.grammars.GrammarBackend): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_speculators(register: Register) -> None:
    """Register speculators (engine.core.speculators.Speculator): call `register` once for each.

    Called when plugins are loaded. An exception makes the plugin fail to load.
    """


@hookspec
def register_routes(routes: Routes) -> None:
    """Add routes to the HTTP server, such as those of a conversation protocol (engine.core.protocols.Routes).

    Called in each front end process of `engine serve`, when all engines have started. An exception becomes a warning,
    and none of the plugin's routes is added; a path that is taken is refused by name.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to `app`, an empty Typer application of this plugin's own, for the `engine` command line.

    Called by `engine --help` and by `engine NAME` when NAME is no built-in command. An exception becomes a warning, and
    the plugin's commands are left out; so is a command whose name is taken.
    """


@hookspec
def engine_started(engine: Engine) -> None:
    """Called at the end of `Engine(...)`, before the first request: model loaded, KV cache allocated.

    Called in the engine process alone, for the plugin loaded last first. The hook only observes: an exception is logged
    with its traceback and the plugin's name and distribution, and the engine goes on.
    """


@hookspec
def engine_stopped(engine: Engine) -> None:
    """Called once by `Engine.close`, after the executor has shut down. The engine can run no more steps.

    Called in the engine process alone, for the plugin loaded last first. An exception is logged, as for
    `engine_started`, and the hooks of the remaining plugins are called.
    """
