"""A warning that may be due very often, logged once in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL = 10.0
"""Minimum seconds between two logs of one warning."""


class ThrottledWarning:
    """Logs a warning at most once per `INTERVAL`, with the number of times it was due since the last log."""

    def __init__(self, log: logging.Logger, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        """text: with %d for the number of times, then the arguments of `count`."""
        self._log = log
        self._text = text
        self._clock = clock
        self._due = 0
        self._next = 0.0

    def count(self, times: int, *arguments: object) -> None:
        """Count the warning as due, and log it unless that was done a moment ago."""
        self._due += times
        now = self._clock()
        if now >= self._next:
            self._log.warning(self._text, self._due, *arguments)
            self._due, self._next = 0, now + INTERVAL
