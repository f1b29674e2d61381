"""Metrics of the host side: the front ends' CPU time by phase, and garbage collections of all processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from engine.core.gc_pauses import GC_BOUNDS, PauseCounts
from engine.core.types import EngineStats
from engine.server.shared.metrics_table import FRONT_END_PHASES, FrontEndMetrics


def host_metrics(front_ends: FrontEndMetrics, engines: Sequence[EngineStats]) -> Iterator[Metric]:
    """Yield the metrics. front_ends: the sum of all; engines: of each replica."""
    if any(front_ends.phase_cells):
        text = "CPU time of the front ends by phase, seconds."
        seconds = CounterMetricFamily("engine_front_end_seconds", text, labels=["phase"])
        for phase, value in zip(FRONT_END_PHASES, front_ends.phase_cells, strict=True):
            seconds.add_metric([phase], value)
        yield seconds
    replica = ["replica"] if len(engines) > 1 else []
    text = "Pauses of garbage collections, by process and generation."
    pauses = HistogramMetricFamily("engine_gc_seconds", text, labels=[*replica, "process", "generation"])
    _add(pauses, [""] * len(replica) + ["front_end"], front_ends.gc_pauses.counts())
    for number, stats in enumerate(engines):
        for process, counts in stats.gc_pauses:
            _add(pauses, [str(number)] * len(replica) + [process], counts)
    yield pauses


def _add(family: HistogramMetricFamily, labels: Sequence[str], counts: PauseCounts) -> None:
    """Add a process's histograms."""
    for generation, cells in enumerate(counts):
        totals = accumulate(cells[:-1])
        buckets = list(zip((*map(str, GC_BOUNDS), "+Inf"), totals, strict=True))
        family.add_metric([*labels, str(generation)], buckets, sum_value=cells[-1])
