"""The command `engine top`: once, as JSON, and what happens when the server goes away or is another."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from engine.cli.top import command
from engine.cli.top.command import Watch, print_json, print_once, show
from engine.cli.top.screen import Line
from engine.cli.top.server import WatchedServer
from engine.core.errors import ConfigError
from tests.cli.top.metrics_server import MetricsServer, metrics_server

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "zmq", "numpy", "safetensors", "prometheus_client")


class FakeTerminal:
    """Keeps what is drawn; each wait passes, and what stands in `meanwhile` is called in turn."""

    size = (80, 24)

    def __init__(self, *meanwhile: Any, clock: Clock) -> None:
        self.screens: list[str] = []
        self._meanwhile = iter(meanwhile)
        self._clock = clock

    def draw(self, lines: Sequence[Line]) -> None:
        self.screens.append("\n".join(line.text for line in lines))

    def wait(self, until: float) -> str:
        self._clock.now = until
        for call in self._meanwhile:
            call()
            return ""
        return "q"


class Clock:
    """Stands in for the module time: sleeping passes immediately."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 2000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def strftime(self, format: str) -> str:  # noqa: A002
        return "12:00:00"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(command, "time", made)
    monkeypatch.setattr("engine.cli.top.server.time", made)
    return made


def nothing() -> None:
    pass


@pytest.mark.usefixtures("clock")
def test_once_prints_one_interval_as_text_without_escape_codes(run: Any, served: MetricsServer) -> None:
    done = run("top", served.url, "--once")
    assert done.exit_code == 0, done.output
    assert re.search(r"^Tokens +400 generated/s", done.stdout, re.MULTILINE)
    assert "\x1b" not in done.stdout


@pytest.mark.usefixtures("clock")
def test_once_with_json_prints_one_object(run: Any, served: MetricsServer) -> None:
    found = json.loads(run("top", served.url, "--once", "--json", "--interval", "4").stdout)
    assert (found["seconds"], found["model"], found["health"]["status"]) == (4.0, "tiny", "ok")
    assert found["total"]["generated_tokens"] == 200.0


def test_once_ends_with_a_sentence_when_the_server_goes_away(run: Any, clock: Clock) -> None:
    with metrics_server() as server:
        watch = Watch(WatchedServer(server.url), 2.0)
        watch.look()
    watch.server.close()
    with pytest.raises(Exception, match="cannot be reached"):
        print_once(watch, as_json=False)
    done = run("top", server.url, "--once")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {server.url} cannot be reached")


def test_once_ends_with_a_sentence_when_the_server_was_restarted(run: Any, served: MetricsServer, clock: Clock) -> None:
    watch = Watch(WatchedServer(served.url), 2.0)
    watch.look()
    served.options = {"started": 5000.0}
    with pytest.raises(Exception, match="was restarted in the interval"):
        print_once(watch, as_json=False)
    watch.server.close()


def test_the_screen_keeps_trying_when_the_server_goes_away(clock: Clock) -> None:
    with metrics_server() as server:
        watch = Watch(WatchedServer(server.url), 2.0)
        watch.look()
        before = FakeTerminal(nothing, clock=clock)
        show(watch, before)
    after = FakeTerminal(nothing, clock=clock)
    watch.server.close()
    show(watch, after)
    assert "The first figures come after 2 s." in before.screens[0]
    assert "400 generated/s" in before.screens[1]
    said = " ".join(after.screens[-1].split())
    assert "cannot be reached: Connection refused; trying again every 2 s, last answer 4 s ago" in said
    assert "400 generated/s" in after.screens[-1], "the last figures"


def test_the_screen_begins_again_when_another_server_answers(served: MetricsServer, clock: Clock) -> None:
    watch = Watch(WatchedServer(served.url), 2.0)
    watch.look()

    def restart() -> None:
        served.options, served.scale = {"started": 5000.0}, 1.0

    terminal = FakeTerminal(restart, nothing, clock=clock)
    show(watch, terminal)
    watch.server.close()
    assert "another server answers now" in terminal.screens[1]
    assert "400 generated/s" in terminal.screens[2]
    assert "another server" not in terminal.screens[2]


def test_the_screen_ends_with_a_sentence_when_the_metrics_become_others(served: MetricsServer, clock: Clock) -> None:
    watch = Watch(WatchedServer(served.url), 2.0)
    watch.look()

    def change() -> None:
        served.text = "up 1\n"

    with pytest.raises(ConfigError, match="not those of `engine serve`"):
        show(watch, FakeTerminal(change, clock=clock))
    watch.server.close()


def test_json_has_an_object_per_interval_and_one_that_says_why_there_are_no_figures(
    served: MetricsServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(WatchedServer(served.url), 2.0)
    watch.look()
    printed: list[str] = []
    number = itertools.count(1)

    def echo(text: str) -> None:
        printed.append(text)
        if next(number) == 1:
            served.status = 503
        elif len(printed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.typer, "echo", echo)
    with pytest.raises(KeyboardInterrupt):
        print_json(watch)
    watch.server.close()
    first, second, _ = map(json.loads, printed)
    assert first["total"]["steps"] == 50.0
    assert "answers 503" in second["error"]
    assert "total" not in second


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "standard output is not a terminal; give --once for text, or --json"),
        (("localhost", "--once"), "is not the URL of a server"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Any, options: Sequence[str], sentence: str) -> None:
    done = run("top", *options)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_screen_needs_neither_torch_nor_the_servers_packages(served: MetricsServer) -> None:
    program = (
        "import sys\n"
        "from engine.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, "top", served.url, "--once", "--interval", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert "generated/s" in done.stdout
