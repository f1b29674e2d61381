"""The terminal's screen, on a pseudo-terminal: left as it was whatever ends the command."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.cli.top.screen import Line
from engine.cli.top.terminal import ENTER, LEAVE, Terminal, drawn, full_screen
from tests.cli.top.metrics_server import MetricsServer

TOP = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "top")


class PseudoTerminal:
    """A terminal: what a program writes to it, and what is typed."""

    def __init__(self) -> None:
        self.typed, self.program = pty.openpty()
        self.resize(80, 24)
        self.written = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.program, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, until: str) -> None:
        """Read until this text has been written."""
        deadline = time.monotonic() + 30
        while until not in self.written:
            assert time.monotonic() < deadline, self.written
            if select.select([self.typed], [], [], 0.1)[0]:
                self.written += os.read(self.typed, 2**16).decode()

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.program)

    @contextmanager
    def screen(self) -> Iterator[Terminal]:
        """The screen of this process on it."""
        with (
            os.fdopen(os.dup(self.program), "w") as output,
            os.fdopen(os.dup(self.program)) as typed,
            full_screen(output, typed) as screen,
        ):
            yield screen

    def close(self) -> None:
        os.close(self.typed)
        os.close(self.program)


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    made = PseudoTerminal()
    yield made
    made.close()


def raise_on_screen(terminal: PseudoTerminal, error: type[BaseException]) -> None:
    with terminal.screen():
        assert not terminal.settings()[3] & (termios.ECHO | termios.ICANON)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_the_terminal_is_left_as_it_was_when_the_block_raises(
    terminal: PseudoTerminal, error: type[BaseException]
) -> None:
    before, handler = terminal.settings(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        raise_on_screen(terminal, error)
    terminal.read(LEAVE)
    assert terminal.written.startswith(ENTER)
    assert terminal.settings() == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_wait_ends_with_a_key_at_its_time_and_when_the_size_changes(terminal: PseudoTerminal) -> None:
    with terminal.screen() as screen:
        os.write(terminal.typed, b"xq")
        assert screen.wait(time.monotonic() + 60) == "x"
        assert screen.wait(time.monotonic() + 60) == "q"
        assert screen.wait(time.monotonic()) == ""
        sizes = iter([(80, 24), (80, 24), (100, 30)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Terminal, "size", property(lambda _: next(sizes)))
            assert screen.wait(time.monotonic() + 60) == ""
        assert screen.size == (80, 24)
        terminal.resize(100, 30)
        assert screen.size == (100, 30)


def test_a_screen_is_drawn_over_the_last_one_without_clearing_first() -> None:
    text = drawn([Line("one", "title"), Line("two")])
    assert "\x1b[2J" not in text
    places = [text.index(part) for part in ("\x1b[H", "one", "\x1b[K\r\n", "two", "\x1b[J")]
    assert places == sorted(places)


@pytest.mark.parametrize(("end", "status"), [("q", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_command_shows_the_server_until_it_is_ended(
    served: MetricsServer, terminal: PseudoTerminal, end: str | int, status: int
) -> None:
    before = terminal.settings()
    command, program = [*TOP, served.url, "--interval", "0.5"], terminal.program
    process = subprocess.Popen(command, stdin=program, stdout=program, stderr=program)
    try:
        terminal.read("generated/s")
        if isinstance(end, str):
            os.write(terminal.typed, end.encode())
        else:
            process.send_signal(end)
        assert process.wait(30) == status
    finally:
        process.kill()
        process.wait()
    terminal.read(LEAVE)
    assert terminal.written.endswith(LEAVE)
    assert terminal.settings() == before
