"""The `engine` command: its parts, its errors, and the commands that plugins add."""

from __future__ import annotations

import importlib.metadata
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from engine.cli import bench, chat, config, generate, plugins, quantize, serve
from engine.core.errors import EngineError, ExecutorError

if TYPE_CHECKING:
    from engine.core.plugin_host import Plugins

DEBUG = "engine.debug"


class Commands(TyperGroup):
    """The root of the command line.

    Plugins are looked up only for `--help` and for a command that is none of the built-in ones. An EngineError becomes
    one sentence on stderr: exit status 2 for what the user can mend, 1 for a failure while running.
    """

    _complete = False
    """Whether the commands of plugins are in."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, those of plugins last."""
        self._add_late()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name not in self.commands:
            self._add_late()
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except EngineError as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, ExecutorError) else 2) from error

    def _add_late(self) -> None:
        from engine.core.plugin_host import load_plugins

        if self._complete:
            return
        self._complete = True
        for plugin, command in late_commands(load_plugins()):
            if command.name in self.commands:
                _warn(f"plugin {plugin} offers a command {command.name!r}, a name that is taken; it is left out")
            else:
                self.add_command(command)


def late_commands(plugins: Plugins) -> list[tuple[str, Any]]:
    """(plugin, command) of the commands that plugins register. One that raises gets a warning and adds nothing."""
    found: list[tuple[str, Any]] = []
    for hook in plugins.hook.register_commands.get_hookimpls():
        own = typer.Typer(callback=lambda: None)  # with a callback, even one command makes a group
        try:
            hook.function(own)
            found.extend((hook.plugin_name, command) for command in typer.main.get_group(own).commands.values())
        except Exception as error:
            _warn(f"plugin {hook.plugin_name} could not add its commands: {type(error).__name__}: {error}")
    return found


def _warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)


app = typer.Typer(
    name="engine",
    cls=Commands,
    help="Serve large language models with every contested part a plugin.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(quantize.quantize)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(plugins.app, name="plugins")


def _print_version(wanted: bool) -> None:
    if wanted:
        from engine.core.plugin_host import HOME

        typer.echo(f"engine {importlib.metadata.version(HOME)}")
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
    app()
