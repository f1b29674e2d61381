"""Requests of each API key, counted by all front ends in shared memory.

The table is a file of numbers with one row per front end, which only its front end writes; all front ends read all
rows. So no lock is needed that a stopped front end could hold, at the price that front ends which admit requests at the
same moment may together admit one too many each.

The rate is that of a sliding minute: the requests of the present minute of the clock, and those of the minute before in
proportion to how much of that minute is less than 60 seconds ago.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from engine.core.config import ServerConfig

MINUTE = 60.0
_ACTIVE, _MINUTE, _COUNT, _BEFORE = range(4)
CELLS = 4
"""Numbers per front end and key: requests in progress, a minute, requests of that minute and of the one before."""


def has_limits(config: ServerConfig) -> bool:
    """Whether there is anything to count."""
    return bool(config.rate_limit or config.concurrency_limit)


class LimitsTable:
    """The rows of all front ends, seen from one of them."""

    def __init__(self, rows: Sequence[memoryview[float]], row: int) -> None:
        """row: number of this front end's row. Clears its requests in progress, left by a front end that died."""
        self._rows = rows
        self._own = rows[row]
        for at in range(_ACTIVE, len(self._own), CELLS):
            self._own[at] = 0.0

    @classmethod
    def create(cls, file: Path, front_ends: int, keys: int) -> None:
        """Make the file of an empty table; without keys, all clients count as one."""
        file.write_bytes(bytes(8 * CELLS * front_ends * max(1, keys)))

    @classmethod
    def map(cls, file: Path, front_ends: int, keys: int, row: int) -> LimitsTable:
        """Map the table in `file` as the front end of a row."""
        size = CELLS * max(1, keys)
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * size * front_ends)).cast("d")
        return cls([cells[size * number : size * (number + 1)] for number in range(front_ends)], row)

    def active(self, key: int) -> int:
        """Requests in progress with a key; keys are numbered from 0."""
        return int(sum(row[CELLS * key + _ACTIVE] for row in self._rows))

    def begin(self, key: int, now: float) -> None:
        """Count a request that begins."""
        at = CELLS * key
        minute = now // MINUTE
        self._own[at + _BEFORE] = self._in_minute(self._own, at, minute - 1)
        self._own[at + _COUNT] = self._in_minute(self._own, at, minute) + 1
        self._own[at + _MINUTE] = minute
        self._own[at + _ACTIVE] += 1

    def end(self, key: int) -> None:
        """Count the end of a request."""
        self._own[CELLS * key + _ACTIVE] -= 1

    def seconds_until(self, key: int, limit: int, now: float) -> float:
        """Seconds until one more request stays within `limit` requests per minute; 0: it does now."""
        at = CELLS * key
        minute, passed = now // MINUTE, now % MINUTE
        count = sum(self._in_minute(row, at, minute) for row in self._rows)
        before = sum(self._in_minute(row, at, minute - 1) for row in self._rows)
        if count + 1 <= limit:
            return max(0.0, _when(before, limit - count - 1) - passed)
        return MINUTE - passed + _when(count, limit - 1)

    @staticmethod
    def _in_minute(row: memoryview[float], at: int, minute: float) -> float:
        """Requests that a front end has begun in a minute that is its last one with a request, or the one before."""
        last = row[at + _MINUTE]
        if last == minute:
            return row[at + _COUNT]
        return row[at + _BEFORE] if last == minute + 1 else 0.0


def _when(before: float, room: float) -> float:
    """Seconds of a minute after which the share of the `before` requests of the minute before is at most `room`."""
    return MINUTE * (1 - room / before) if before > room else 0.0
