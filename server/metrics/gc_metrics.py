"""Samples of the garbage collections of a process."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.gc_pauses import PauseCounts
from engine.core.types import HistogramCounts
from engine.server.metrics.definition import Sample


def pause_samples(counts: PauseCounts, *labels: str) -> Iterator[Sample]:
    """A histogram of the pauses of each generation, whose number is the last label."""
    for generation, cells in enumerate(counts):
        yield (*labels, str(generation)), HistogramCounts(tuple(map(int, cells[:-1])), cells[-1])
