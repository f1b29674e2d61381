"""The `engine` command: imports the command that is called, reports errors, and adds the commands of plugins."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from engine.cli.errors import ServerError
from engine.core.collector import paused
from engine.core.errors import EngineError, ExecutorError

if TYPE_CHECKING:
    from engine.core.plugin_host import PluginInfo, Plugins

DEBUG = "engine.debug"
SERVE = "engine.cli.serve"
"""The module of the command whose process must exit in time. Only that command imports it."""


class Builtin(NamedTuple):
    """A built-in command, imported when it is called."""

    target: str
    """MODULE:NAME in engine.cli, a function or a typer.Typer."""
    summary: str
    """The first line of the command's own help."""

    def load(self, name: str) -> Any:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        with paused():
            found = getattr(import_module(f"engine.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name)(function)
            return typer.main.get_command(found)
        group = typer.main.get_group(found)
        group.name = name
        return group


BUILTINS = {
    "serve": Builtin(
        "serve:serve",
        "Serve the protocols of OpenAI and Anthropic over HTTP, with the demo model unless another is named.",
    ),
    "generate": Builtin("generate:generate", "Continue a prompt, printing the text as it comes."),
    "chat": Builtin("chat:chat", "Talk to a model. Piped in, each line is one message; /reset and /exit work in both."),
    "download": Builtin("download:download", "Download a model's missing files from the hub, and print its directory."),
    "quantize": Builtin("quantize:quantize", "Write a quantized copy of a checkpoint, layer by layer."),
    "bench": Builtin("bench.commands:app", "Measure speed on this machine."),
    "profile": Builtin("profile:app", "See where time and memory go."),
    "top": Builtin(
        "top.command:top",
        "Watch a running server: requests, tokens, latencies, KV cache, phases of a step, roofline, processes.",
    ),
    "config": Builtin("config:app", "Show the settings and the origin of each."),
    "plugins": Builtin("plugins:app", "List and check the installed plugins."),
}


class Commands(TyperGroup):
    """The root of the command line.

    A built-in command is imported when it is called; `--help` needs only its name. Plugins are loaded only for `--help`
    and for a command that is not built in. An EngineError becomes one sentence on stderr, with exit status 2 for a
    mistake of the user, 1 for a failure while running.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._has_plugin_commands = False
        for name, builtin in BUILTINS.items():
            self.add_command(TyperCommand(name, help=builtin.summary))

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, those of plugins last."""
        self._add_plugin_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None; of a built-in command only name and help."""
        if cmd_name not in self.commands:
            self._add_plugin_commands()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, imported."""
        self.load_builtins(args[:1])
        return super().resolve_command(ctx, args)

    def load_builtins(self, names: Iterable[str] = BUILTINS) -> None:
        """Import the built-in commands of these names; other names are ignored."""
        for name in BUILTINS.keys() & set(names):
            self.commands[name] = BUILTINS[name].load(name)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except EngineError as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, (ExecutorError, ServerError)) else 2) from error

    def _add_plugin_commands(self) -> None:
        if self._has_plugin_commands:
            return
        self._has_plugin_commands = True
        if not other_plugins_installed():
            return
        from engine.core.plugin_host import load_plugins

        for plugin, command in plugin_commands(load_plugins()):
            if command.name in self.commands:
                _warn(f"{plugin} offers a command {command.name!r}, a name that is taken; it is left out")
            else:
                self.add_command(command)


def other_plugins_installed() -> bool:
    """Whether any plugin but the built-in ones, which have no commands, is installed; needs no plugin host."""
    return any(point.name != "builtin" for point in entry_points(group="engine"))


def plugin_commands(plugins: Plugins) -> list[tuple[PluginInfo, Any]]:
    """(plugin, command) of each command that plugins register. A plugin that raises gets a warning and adds nothing."""
    from engine.core.plugin_host import raise_interrupt

    found: list[tuple[PluginInfo, Any]] = []
    for plugin, manager in zip(plugins.loaded, plugins.managers, strict=True):
        own = typer.Typer(callback=lambda: None)  # with a callback, even one command makes a group
        try:
            manager.hook.register_commands(app=own)
            commands = list(typer.main.get_group(own).commands.values())
        except BaseException as error:
            raise_interrupt(error)
            _warn(f"{plugin} could not add its commands: {type(error).__name__}: {error}")
        else:
            found += [(plugin, _named(command, plugin)) for command in commands]
    return found


def _named(command: Any, plugin: PluginInfo) -> Any:
    """The command of a plugin; the traceback of what the command raises ends with the plugin's name."""
    invoke = command.invoke

    def named_invoke(ctx: Any) -> Any:
        try:
            return invoke(ctx)
        except Exception as error:
            error.add_note(f"in the command {command.name!r} of {plugin}")
            raise

    command.invoke = named_invoke
    return command


def _warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)


app = typer.Typer(
    name="engine",
    cls=Commands,
    help="Serve large language models; attention, quantization, scheduling, executors and models are plugins.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import engine

        typer.echo(f"engine {engine.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    ctx.meta[DEBUG] = debug


def main() -> None:
    """Run the command line; the `engine` script."""
    code = 1  # of any other exception
    try:
        app()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
    finally:
        if SERVE in sys.modules:  # it has loaded plugins, which may hold up the exit
            from engine.server.shared.exit_limit import limit_exit

            limit_exit(code)
