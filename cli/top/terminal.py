"""A terminal's alternate screen: drawn without flicker, read key by key, and left as it was."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from engine.cli.top.screen import Line

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Change to the alternate screen without cursor, and back."""
BEGIN_UPDATE, END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these codes show the output between them in one go; others ignore them."""
HOME, END_LINE, END_SCREEN, PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"
STYLES = {"": "", "title": "\x1b[7m", "heading": "\x1b[1m", "warning": "\x1b[1m"}
POLL = 0.2
"""Seconds within which a change of the terminal's size is noticed."""


def drawn(lines: Sequence[Line]) -> str:
    """The text that draws these lines over what the terminal shows, clearing the rest line by line."""
    text = (f"{END_LINE}\r\n").join(f"{STYLES[line.style]}{line.text}{PLAIN}" for line in lines)
    return f"{BEGIN_UPDATE}{HOME}{text}{END_LINE}{END_SCREEN}{END_UPDATE}"


class Terminal:
    """The terminal while `full_screen` lasts."""

    def __init__(self, output: TextIO, keys: int | None) -> None:
        """keys: descriptor of the terminal that is typed on; None: standard input is something else."""
        self._output = output
        self._keys = keys

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            columns, lines = os.get_terminal_size(self._output.fileno())
        except OSError:
            columns, lines = shutil.get_terminal_size()
        return columns, lines

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines and nothing else; no more lines than the terminal has."""
        self._output.write(drawn(lines))
        self._output.flush()

    def wait(self, until: float) -> str:
        """Wait until a moment of time.monotonic(), a key press or a change of the size; return the key, if any."""
        size = self.size
        while (left := until - time.monotonic()) > 0 and self.size == size:
            if self._keys is None:
                time.sleep(min(POLL, left))
            elif select.select([self._keys], [], [], min(POLL, left))[0]:
                if key := os.read(self._keys, 1):
                    return key.decode("latin-1")
                self._keys = None
        return ""


@contextmanager
def full_screen(output: TextIO, typed: TextIO) -> Iterator[Terminal]:
    """The terminal's alternate screen, until the block ends in any way, SIGTERM included.

    typed: where keys come from; none come if that is no terminal.
    """
    with _ended_by_sigterm(), _keys(typed) as keys:
        output.write(ENTER)
        try:
            yield Terminal(output, keys)
        finally:
            output.write(LEAVE)
            output.flush()


@contextmanager
def _keys(typed: TextIO) -> Iterator[int | None]:
    """The descriptor of the terminal that is typed on, whose keys come one by one and are not shown."""
    try:
        import termios
    except ImportError:  # not a Unix system
        yield None
        return
    if not typed.isatty():
        yield None
        return
    keys = typed.fileno()
    before = termios.tcgetattr(keys)
    now: list[Any] = termios.tcgetattr(keys)
    now[3] &= ~(termios.ECHO | termios.ICANON)
    now[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the alternate screen to the shell
    termios.tcsetattr(keys, termios.TCSANOW, now)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSANOW, before)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that context managers end."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
