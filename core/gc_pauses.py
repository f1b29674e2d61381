"""Measures the pauses of a process that its garbage collections cause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from engine.core.histogram import Histogram, num_cells
from engine.core.types import HistogramCounts

GC_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper bounds of the histogram's buckets, seconds."""
GENERATIONS = 3


class GcPauses:
    """Counts the collections of this process by generation and duration.

    Two callbacks per collection, together about 1 us; nothing between collections.
    """

    SIZE = GENERATIONS * num_cells(GC_BOUNDS)

    def __init__(self, cells: memoryview[float] | None = None) -> None:
        """cells: `SIZE` numbers to count in; None: in memory of its own."""
        self._generations = [Histogram(GC_BOUNDS, part) for part in _parts(cells)]
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

    def counts(self) -> tuple[HistogramCounts, ...]:
        """The pauses so far, seconds, by generation; () before the first collection."""
        found = tuple(generation.snapshot() for generation in self._generations)
        return found if any(one.counts for one in found) else ()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begin = perf_counter()
            return
        self._generations[info["generation"]].observe(perf_counter() - self._begin)
        self.collections += 1


def _parts(cells: memoryview[float] | None) -> Iterator[memoryview[float] | None]:
    """The cells of each generation."""
    size = num_cells(GC_BOUNDS)
    for number in range(GENERATIONS):
        yield None if cells is None else cells[size * number : size * (number + 1)]
