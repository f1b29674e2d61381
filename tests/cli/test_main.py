from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.markup import render

from engine.cli.main import BUILTINS
from engine.core.errors import CapacityError, ExecutorError
from engine.core.hooks import hookimpl
from engine.core.plugin_host import load, registry

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "zmq", "numpy", "safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plugins", "list"],
        ["config", "show"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["quantize", "--help"],
        ["top", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: Any) -> None:
    program = (
        "import sys\n"
        "from engine.cli.main import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout


def test_main_prints_the_version() -> None:
    program = "import sys; from engine.cli.main import main; sys.argv = ['engine', '--version']; main()"
    assert subprocess.check_output([sys.executable, "-c", program]).startswith(b"engine ")


def test_help_lists_every_command(run: Any) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "generate", "chat", "quantize", "bench", "top", "config", "plugins"):
        assert f" {command} " in result.stdout


def test_help_names_what_plugins_implement_and_the_protocols_that_are_served(run: Any) -> None:
    words = " ".join(run("--help").stdout.split())
    assert all(kind in words for kind in ("attention", "quantization", "scheduling", "executors", "models"))
    assert "protocols of OpenAI and Anthropic" in " ".join(run("serve", "--help").stdout.split())


def test_help_says_of_each_command_what_the_command_says_itself() -> None:
    for name, builtin in BUILTINS.items():
        assert builtin.load(name).help.partition("\n")[0] == builtin.summary


def test_a_wrong_plugin_is_named_before_torch_is_imported() -> None:
    program = (
        "import sys\nfrom engine.cli.main import app\ntry: app(sys.argv[1:])\nfinally: print('torch' in sys.modules)\n"
    )
    for options in (
        ("serve", "--attention", "nope"),
        ("serve", "--scheduler", "nope"),
        ("generate", "hi", "--quant", "nope"),
    ):
        done = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "False\n")
        assert "plugin 'nope'" in done.stderr


def test_version_is_that_of_the_package(run: Any) -> None:
    assert run("--version").stdout.strip() == f"engine {importlib.metadata.version(registry.HOME)}"


def test_an_unknown_command_is_answered_with_the_nearest(run: Any) -> None:
    result = run("generte")
    assert result.exit_code == 2
    assert "generate" in result.stderr


def test_an_unknown_flag_is_answered_with_the_nearest(run: Any) -> None:
    result = run("serve", "--max-runing", "3")
    assert result.exit_code == 2
    assert "--max-running" in result.stderr


@pytest.mark.parametrize(("error", "status"), [(CapacityError("too big"), 2), (ExecutorError("it broke"), 1)])
def test_an_error_is_one_sentence(run: Any, monkeypatch: pytest.MonkeyPatch, error: Any, status: int) -> None:
    def fail(config: object) -> int:
        raise error

    monkeypatch.setattr("engine.server.run", fail)
    result = run("serve")
    assert (result.exit_code, result.stderr, result.stdout) == (status, f"error: {error}\n", "")


def test_debug_prints_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> int:
        raise CapacityError("too big")

    monkeypatch.setattr("engine.server.run", fail)
    result = run("--debug", "serve")
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: too big\n")


def test_serve_hands_over_the_configuration_and_returns_the_exit_code(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fake(config: Any) -> Any:
        seen.append(config)
        return 143

    monkeypatch.setattr("engine.server.run", fake)
    assert run("serve", "--port", "9", "--max-running", "5").exit_code == 143
    assert (seen[0].server.port, seen[0].scheduler.max_running) == (9, 5)


class Greeter:
    """A plugin that adds commands."""

    @hookimpl
    def register_commands(self, app: typer.Typer) -> None:
        @app.command()
        def greet(name: str) -> None:
            """Say hello."""
            typer.echo(f"hello {name}")

        @app.command()
        def serve() -> None:
            """Not this one: the name is taken."""


class Broken:
    """A plugin that cannot add its commands."""

    @hookimpl
    def register_commands(self, app: typer.Typer) -> None:
        raise RuntimeError("out of order")


class Leaving:
    """A plugin that would end the process."""

    @hookimpl
    def register_commands(self, app: typer.Typer) -> None:
        raise SystemExit(3)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """plugged(plugin, ...) installs plugins for the commands that look for them."""
    real = load.load_plugins

    def install(*plugins: object) -> None:
        monkeypatch.setattr("engine.cli.main.other_plugins_installed", lambda: True)
        monkeypatch.setattr(load, "load_plugins", lambda *config: real(*config, extra=plugins))

    return install


def test_a_plugin_adds_a_command(run: Any, plugged: Any) -> None:
    plugged(Greeter())
    help_page = run("--help")
    assert "Say hello." in help_page.stdout
    assert help_page.stderr.count("warning") == 1, "its other command has a name that is taken"
    assert run("greet", "you").stdout == "hello you\n"


def test_a_plugin_does_not_replace_a_command(run: Any, plugged: Any) -> None:
    plugged(Greeter())
    result = run("--help")
    assert "Not this one" not in result.stdout
    assert result.stderr == (
        "warning: plugin 'Greeter' of object offers a command 'serve', a name that is taken; it is left out\n"
    )


COMMAND = """
from engine.core.hooks import hookimpl

@hookimpl
def register_commands(app):
    @app.command()
    def fall(way: str):
        raise KeyError(way)
"""


def test_traceback_of_a_command_of_a_plugin_ends_with_the_name_of_the_plugin(run: Any, install: Any) -> None:
    install("engine-fall", "9.9", COMMAND, entry="fall")
    result = run("fall", "down")
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)
    assert traceback.format_exception(result.exception)[-2:] == [
        "KeyError: 'down'\n",
        "in the command 'fall' of plugin 'fall' of engine-fall 9.9\n",
    ]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Broken, "plugin 'Broken' of object could not add its commands: RuntimeError: out of order"),
        (Leaving, "plugin 'Leaving' of object could not add its commands: SystemExit: 3"),
    ],
)
def test_a_plugin_that_fails_to_add_commands_is_a_warning(
    run: Any, plugged: Any, plugin: type[Any], message: str
) -> None:
    plugged(plugin(), Greeter())
    result = run("greet", "you")
    assert result.stdout == "hello you\n"
    assert f"warning: {message}\n" in result.stderr


def test_built_in_commands_look_for_no_plugin(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_plugins", lambda *config: pytest.fail("plugins were loaded"))
    assert run("config", "show").exit_code == 0


def params_of(command: Any, path: str = "engine") -> Iterator[tuple[str, str]]:
    """(place, help) of each option and argument of a command and of those below it, and of the commands themselves."""
    yield path, command.help or ""
    for param in command.params:
        yield f"{path} {param.name}", getattr(param, "help", None) or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from params_of(below, f"{path} {name}")


def test_help_shows_brackets_of_every_command_as_they_are_written(run: Any) -> None:
    for name, builtin in BUILTINS.items():
        for place, text in params_of(builtin.load(name), name):
            assert render(text).plain == text.replace(r"\[", "["), place
    assert "plugins.deny=[a,b]." in " ".join(run("config", "show", "--help").stdout.replace("│", " ").split())


EXIT = """
import atexit, sys, time
from engine.cli import main
from engine.server.shared import exit_limit

limit_exit = exit_limit.limit_exit
exit_limit.limit_exit = lambda code: limit_exit(code, 0.1)

def app():
    {ending}

main.app = app
if {serves}:
    sys.modules[main.SERVE] = sys
atexit.register(time.sleep, {seconds})
main.main()
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('text')", 1), ("raise RuntimeError('a bug')", 1)],
)
def test_the_exit_of_serve_is_limited_however_the_command_ends(ending: str, code: int) -> None:
    script = EXIT.format(ending=ending, serves=True, seconds=100)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "the exit of this process is held up by " in done.stderr
    assert ("a bug" in done.stderr) == ("a bug" in ending)


def test_the_exit_of_other_commands_is_not_limited() -> None:
    script = EXIT.format(ending="sys.exit(3)", serves=False, seconds=0.5)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
