"""`engine top`: the figures of a running server, on the whole terminal, once as text, or as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import attrs
import typer

from engine.cli.api_key import KEY_VARIABLES, client_key
from engine.cli.errors import ServerError
from engine.cli.metrics.scrape import Interval, Scrape
from engine.cli.top.compute import figures
from engine.cli.top.figures import Figures
from engine.cli.top.screen import Line, State, lines
from engine.cli.top.server import Health, WatchedServer
from engine.cli.top.terminal import full_screen
from engine.core.errors import ConfigError

TEXT_WIDTH = 120
"""Columns of the text of --once where standard output is not a terminal and $COLUMNS is not set."""
RESTARTED = (
    "another server answers now: this one was restarted, or the address is that of several; rates come after {:g} s"
)


def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    *,
    interval: Annotated[float, typer.Option(help="Seconds between two scrapes of the server.", min=0.5)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval as text, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per interval; with --once, a single one.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the server. Options show in lists of processes: better give it in "
            f"{' or '.join(KEY_VARIABLES)}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch a running server: requests, tokens, latencies, KV cache, phases of a step, roofline, processes."""
    if not (once or as_json or sys.stdout.isatty()):
        raise ConfigError("standard output is not a terminal; give --once for text, or --json")
    watch = Watch(WatchedServer(url, client_key(api_key)), interval)
    try:
        watch.look()  # an address that is wrong is an error, rather than waited for
        if once:
            print_once(watch, as_json=as_json)
        elif as_json:
            print_json(watch)
        else:
            with full_screen(sys.stdout, sys.stdin) as terminal:
                show(watch, terminal)
    except KeyboardInterrupt:
        pass
    finally:
        watch.server.close()


class Screen(Protocol):
    """What the lines are shown on: a Terminal, or a stand-in in tests."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines and nothing else."""

    def wait(self, until: float) -> str:
        """Wait until a moment of time.monotonic(), a key press or a change of the size; return the key, if any."""


class Watch:
    """What is known of a server: its latest scrape, and the figures since the scrape before."""

    def __init__(self, server: WatchedServer, interval: float) -> None:
        """interval: seconds between two scrapes."""
        self.server = server
        self.interval = interval
        self.figures: Figures | None = None
        """None before the second scrape of a server."""
        self.health: Health | None = None
        self.problem = ""
        """Why the server does not answer; empty if it does."""
        self.notice = ""
        """Why there are no figures although the server answers; empty if there are, or none yet."""
        self._latest: Scrape | None = None

    def look(self) -> None:
        """Scrape the server. Raises what `WatchedServer.scrape` and `health` raise."""
        scrape, health = self.server.scrape(), self.server.health()
        before, self._latest = self._latest, scrape
        self.health, self.problem, self.notice = health, "", ""
        if before is None:
            return
        between = Interval(before, scrape)
        if between.other_server:
            self.figures, self.notice = None, RESTARTED.format(self.interval)
        else:
            self.figures = figures(between)

    def look_again(self) -> None:
        """Scrape the server; if it does not answer, set `problem`. Raises ConfigError."""
        try:
            self.look()
        except ServerError as error:
            answered = time.monotonic() - self._latest.time if self._latest is not None else 0.0
            self.problem = f"{error}; trying again every {self.interval:g} s, last answer {answered:.0f} s ago"

    def state(self) -> State:
        """What the screen shows besides figures."""
        return State(
            url=self.server.url,
            clock=time.strftime("%H:%M:%S"),
            interval=self.interval,
            now=time.time(),
            health=self.health,
            problem=self.problem,
            notice=self.notice,
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data, or the error why there are none."""
        found: dict[str, Any] = {"time": time.time(), "url": self.server.url}
        if self.problem or self.figures is None:
            return found | {"error": self.problem or self.notice}
        health = None if self.health is None else attrs.asdict(self.health)
        return found | {"health": health, **attrs.asdict(self.figures)}


def print_once(watch: Watch, *, as_json: bool) -> None:
    """Print one interval. Raises ServerError if the server goes away or is restarted meanwhile."""
    time.sleep(watch.interval)
    watch.look()
    if watch.figures is None:
        raise ServerError(f"{watch.server.url} was restarted in the interval, or has several servers; try again")
    if as_json:
        typer.echo(json.dumps(watch.as_json()))
        return
    width = shutil.get_terminal_size((TEXT_WIDTH, 0)).columns
    for line in lines(watch.state(), watch.figures, width, None):
        typer.echo(line.text.rstrip())


def print_json(watch: Watch) -> None:
    """Print a JSON object per interval, until Ctrl-C."""
    due = time.monotonic()
    while True:
        due = max(due + watch.interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        watch.look_again()
        typer.echo(json.dumps(watch.as_json()))


def show(watch: Watch, terminal: Screen) -> None:
    """Show the server on the terminal until q or Ctrl-C."""
    due = time.monotonic() + watch.interval
    while True:
        columns, rows = terminal.size
        terminal.draw(lines(watch.state(), watch.figures, columns, rows))
        if terminal.wait(due) in ("q", "Q"):
            return
        if time.monotonic() >= due:
            watch.look_again()
            due = time.monotonic() + watch.interval
