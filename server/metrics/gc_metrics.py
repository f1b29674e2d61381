"""Samples of the garbage collections of a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.core.types import HistogramCounts
from engine.server.metrics.definition import Sample


def pause_samples(counts: Sequence[HistogramCounts], *labels: str) -> Iterator[Sample]:
    """A histogram of the pauses of each generation, whose number is the last label."""
    for generation, pauses in enumerate(counts):
        yield (*labels, str(generation)), pauses
