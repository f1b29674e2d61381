"""Shows the progress of an engine's start on standard error: one updated line on a terminal, else a line at times."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from engine.core.startup import Listener, Progress, format_progress

INTERVAL = 5.0
"""Seconds between two lines without a terminal; a faster start prints nothing."""
TRANSFER_INTERVAL = 30.0
"""Seconds between two lines of a download without a terminal; its begin and end have lines too."""

log = logging.getLogger(__name__)


@contextmanager
def show_startup(
    stream: TextIO | None = None,
    *,
    lines: bool = True,
    live: bool = True,
    prefix: str = "starting: ",
    logged: bool = False,
) -> Iterator[Listener]:
    """A listener that prints the progress reported to it on `stream` (None: standard error).

    lines: whether to print more than downloads if `stream` is not a terminal. live: whether to update the line of a
    terminal; False: print as if it were none. logged: log the lines instead, with level info.
    """
    stream = stream or sys.stderr
    if logged:
        yield _Lines(log.info, prefix, startup=lines)
    elif live and stream.isatty():
        terminal = _Terminal(stream, prefix)
        try:
            yield terminal
        finally:
            terminal.clear()
    else:
        yield _Lines(partial(print, file=stream, flush=True), prefix, startup=lines)


class _Terminal:
    """Overwrites its own line. The cursor stays visible: a killed process could not show it again."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix

    def __call__(self, progress: Progress) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write(f"{self._prefix}{format_progress(progress)}"[:width])

    def clear(self) -> None:
        """Erase the line."""
        self._write("")

    def _write(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)


class _Lines:
    """Prints at most one line per interval, and the begin and end of a download."""

    def __init__(self, write: Callable[[str], None], prefix: str, *, startup: bool) -> None:
        self._write = write
        self._prefix = prefix
        self._startup = startup
        self._last_printed = time.monotonic()
        self._download: tuple[str, bool] | None = None
        """The download printed last, and whether it had ended."""

    def __call__(self, progress: Progress) -> None:
        is_download = progress.rate is not None
        if not (is_download or self._startup):
            return
        now, download = time.monotonic(), (progress.phase, progress.done == progress.total)
        due = now - self._last_printed >= (TRANSFER_INTERVAL if is_download else INTERVAL)
        if due or (is_download and download != self._download):
            self._last_printed = now
            self._download = download if is_download else None
            self._write(f"{self._prefix}{format_progress(progress)}")
