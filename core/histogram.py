"""A histogram that the engine process keeps, and the bucket bounds of the engine's own histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.core.types import HistogramCounts

STEP_TOKENS_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
"""Of the tokens that a step computes."""
PREEMPTIONS_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Of the preemptions of a request."""


class Histogram:
    """Counts values in buckets; an observation costs about 0.3 us."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: upper bounds of the buckets, ascending; a value equal to a bound is in that bound's bucket."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramCounts:
        """The counts as plain data."""
        return HistogramCounts(tuple(self._counts), self._sum)
