"""Measures the pauses of a process that its garbage collections cause."""

from __future__ import annotations

import gc
from array import array
from bisect import bisect_left
from time import perf_counter
from typing import Any

GC_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper bounds of the histogram's buckets, seconds."""
GENERATIONS = 3
ROW = len(GC_BOUNDS) + 2
"""Numbers per generation: a count per bound, the count beyond the last bound, the sum in seconds."""

PauseCounts = tuple[tuple[float, ...], ...]
"""A histogram per generation, `ROW` numbers each; () before the first collection."""


class GcPauses:
    """Counts the collections of this process by generation and duration.

    Two callbacks per collection, together about 1 us; nothing between collections.
    """

    SIZE = GENERATIONS * ROW

    def __init__(self, cells: memoryview[float] | None = None) -> None:
        """cells: `SIZE` numbers to count in; None: in memory of its own."""
        self._cells = memoryview(array("d", bytes(8 * self.SIZE))) if cells is None else cells
        self._begin = 0.0
        self.collections = 0
        """Number of collections since `listen`."""

    def listen(self) -> None:
        """Count the collections from now on."""
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        """Stop counting; a second call does nothing."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def counts(self) -> PauseCounts:
        """The counts so far."""
        rows = [tuple(self._cells[ROW * number : ROW * (number + 1)]) for number in range(GENERATIONS)]
        return tuple(rows) if any(map(any, rows)) else ()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begin = perf_counter()
            return
        seconds = perf_counter() - self._begin
        first = ROW * info["generation"]
        self._cells[first + bisect_left(GC_BOUNDS, seconds)] += 1
        self._cells[first + ROW - 1] += seconds
        self.collections += 1
