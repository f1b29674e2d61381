"""Shows how far an engine's start is, on standard error: one line that changes on a terminal, else one now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.core.startup import Listener, Progress, sentence

INTERVAL = 5.0
"""Seconds between two lines where there is no terminal; a start that takes less says nothing."""


@contextmanager
def show_startup(stream: TextIO | None = None, *, lines: bool = True) -> Iterator[Listener]:
    """A listener that shows what it is told on `stream` (None: standard error).

    lines: False: say nothing where `stream` is no terminal.
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
    """Writes over its own line. The cursor stays: this process may be killed before it could be brought back."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, progress: Progress) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write(f"starting: {sentence(progress)}"[:width])

    def clear(self) -> None:
        """Leave nothing behind."""
        self._write("")

    def _write(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)


def _silent(progress: Progress) -> None:
    """Show nothing."""


class _Lines:
    """Writes at most one line in INTERVAL."""

    def __init__(self, stream: TextIO) -> None:
        import time

        self._stream = stream
        self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._said >= INTERVAL:
            self._said = now
            print(f"starting: {sentence(progress)}", file=self._stream, flush=True)
