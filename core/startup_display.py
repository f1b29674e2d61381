"""Shows the progress of an engine's start on standard error: one updated line on a terminal, else a line at times."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.core.startup import Listener, Progress, format_progress

INTERVAL = 5.0
"""Seconds between two lines without a terminal; a faster start prints nothing."""


@contextmanager
def show_startup(stream: TextIO | None = None, *, lines: bool = True) -> Iterator[Listener]:
    """A listener that prints the progress reported to it on `stream` (None: standard error).

    lines: whether to print if `stream` is not a terminal.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        terminal = _Terminal(stream)
        try:
            yield terminal
        finally:
            terminal.clear()
    else:
        yield _Lines(stream) if lines else _silent


class _Terminal:
    """Overwrites its own line. The cursor stays visible: a killed process could not show it again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, progress: Progress) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write(f"starting: {format_progress(progress)}"[:width])

    def clear(self) -> None:
        """Erase the line."""
        self._write("")

    def _write(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)


def _silent(progress: Progress) -> None:
    """Ignore progress."""


class _Lines:
    """Prints at most one line per INTERVAL."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_printed = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last_printed >= INTERVAL:
            self._last_printed = now
            print(f"starting: {format_progress(progress)}", file=self._stream, flush=True)
