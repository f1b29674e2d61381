"""Prometheus metrics of the server, in a registry of its own.

What the front ends count stands in a file that all of them map, a row of numbers for each: a front end writes its own
row and reads all, so whichever is asked knows the sums, and a row outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from engine.core.types import RequestTimes

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets, seconds."""


ENDS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of durations; cheap enough to be fed once a token."""

    def __init__(self, bounds: tuple[float, ...], cells: memoryview[float]) -> None:
        """cells: a count for each bound and for what is beyond the last, and the sum."""
        self._bounds = bounds
        self._cells = cells

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration, or the same one several times."""
        self._cells[bisect_left(self._bounds, seconds)] += count
        self._cells[-1] += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of durations up to it), as Prometheus wants them."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._cells[:-1], strict=True):
            total += count
            buckets.append((bound, total))
        return buckets

    @property
    def sum(self) -> float:
        """All durations together, seconds."""
        return self._cells[-1]


class Metrics:
    """What a front end measures itself; the engine's own numbers come with EngineStats."""

    SIZE = 2 + len(ENDS) + 3 * (len(LONG) + 2) + len(SHORT) + 2
    """Numbers in a row, beside one for each replica of the engine."""

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: a row."""
        self._cells = cells
        self.loads = cells[self.SIZE :]
        """What each replica has to do for this front end, tokens (server/front_end/routing.py)."""
        at = 2 + len(ENDS)
        histograms = []
        for bounds in (LONG, LONG, LONG, SHORT):
            histograms.append(Histogram(bounds, cells[at : at + len(bounds) + 2]))
            at += len(bounds) + 2
        self.first_token, self.queue, self.end_to_end, self.inter_token = histograms

    @property
    def under_way(self) -> int:
        """Requests in the engine."""
        return int(self._cells[0])

    @under_way.setter
    def under_way(self, count: int) -> None:
        self._cells[0] = count

    @property
    def closed(self) -> int:
        """Connections that have ended, so far."""
        return int(self._cells[1])

    def connection_closed(self) -> None:
        """A connection has ended."""
        self._cells[1] += 1

    @property
    def finished(self) -> dict[str, int]:
        """Requests by end."""
        return {reason: int(self._cells[2 + index]) for index, reason in enumerate(ENDS)}

    def ended(self, reason: str, count: int = 1) -> None:
        """Requests ended."""
        self._cells[2 + ENDS.index(reason)] += count

    def tokens(self, seconds: float, count: int, first: bool) -> None:
        """`count` tokens of one request came `seconds` after the ones before, or, with `first`, after its arrival."""
        if first:
            self.first_token.observe(seconds)
        else:
            self.inter_token.observe(seconds / count, count)

    def finish(self, reason: str, times: RequestTimes | None, seconds: float) -> None:
        """A request finished `seconds` after its arrival."""
        self.ended(reason)
        self.end_to_end.observe(seconds)
        if times is not None:
            self.queue.observe(max(0.0, times.scheduled - times.arrival))

    def bury(self) -> None:
        """The front end is dead, and with it its requests and connections."""
        self.ended("abort", self.under_way)
        self.under_way = 0
        for replica in range(len(self.loads)):
            self.loads[replica] = 0.0


class Board:
    """The numbers of all front ends."""

    def __init__(self, rows: Sequence[memoryview[float]]) -> None:
        self._rows = rows
        self.fronts = [Metrics(row) for row in rows]

    @classmethod
    def map(cls, file: Path, rows: int, replicas: int, *, create: bool = False) -> Board:
        """The board in a file, which is made on request."""
        size = Metrics.SIZE + replicas
        if create:
            file.write_bytes(bytes(8 * size * rows))
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * size * rows)).cast("d")
        return cls([cells[size * row : size * (row + 1)] for row in range(rows)])

    @property
    def under_way(self) -> int:
        """Requests in the engine."""
        return sum(front.under_way for front in self.fronts)

    @property
    def loads(self) -> list[float]:
        """What each replica has to do, tokens."""
        return [sum(each) for each in zip(*(front.loads for front in self.fronts), strict=True)]

    def total(self) -> Metrics:
        """The sum of all rows, as of now."""
        return Metrics(memoryview(array("d", map(sum, zip(*self._rows, strict=True)))))
