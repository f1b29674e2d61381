"""A histogram, in memory of its own or of several processes, and the bucket bounds of the engine's own histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.core.types import HistogramCounts

STEP_TOKENS_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
"""Bounds for the tokens that a step computes."""
PREEMPTIONS_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Bounds for the preemptions of a request."""
RESIDENCY_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Bounds for the seconds that KV blocks stay, and until they are reused; vLLM's."""


class Histogram:
    """Counts values in buckets; an observation costs about 0.2 us."""

    __slots__ = ("_bounds", "_cells")

    def __init__(self, bounds: Sequence[float], cells: memoryview[float] | None = None) -> None:
        """bounds: upper bounds of the buckets, ascending; a value equal to a bound is in that bound's bucket.

        cells: memory to count in, `num_cells(bounds)` numbers: a count per bound, the count beyond the last bound, and
        the sum of the values. None: memory of its own.
        """
        self._bounds = bounds
        self._cells = memoryview(bytearray(8 * num_cells(bounds))).cast("d") if cells is None else cells

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._cells[bisect_left(self._bounds, value)] += count
        self._cells[-1] += value * count

    def snapshot(self) -> HistogramCounts:
        """The counts as plain data."""
        *counts, total = self._cells
        return HistogramCounts(tuple(map(int, counts)), total) if any(counts) else HistogramCounts()


def num_cells(bounds: Sequence[float]) -> int:
    """Numbers in which a histogram with these bounds counts."""
    return len(bounds) + 2
