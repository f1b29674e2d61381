"""Prometheus metrics of the server, in a registry of its own.

What the front ends count stands in a file that all of them map, a row of numbers for each: a front end writes its own
row and reads all, so whichever is asked knows the sums, and a row outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.types import EngineStats, RequestTimes

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
    """Numbers in a row."""

    def __init__(self, cells: memoryview[float] | None = None) -> None:
        """cells: a row; None: one of its own."""
        if cells is None:
            cells = memoryview(array("d", [0.0] * self.SIZE))
        self._cells = cells
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


class Board:
    """The numbers of all front ends."""

    def __init__(self, rows: Sequence[memoryview[float]]) -> None:
        self._rows = rows
        self.fronts = [Metrics(row) for row in rows]

    @classmethod
    def map(cls, file: Path, rows: int, *, create: bool = False) -> Board:
        """The board in a file, which is made on request."""
        if create:
            file.write_bytes(bytes(8 * Metrics.SIZE * rows))
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * Metrics.SIZE * rows)).cast("d")
        return cls([cells[Metrics.SIZE * row : Metrics.SIZE * (row + 1)] for row in range(rows)])

    @property
    def under_way(self) -> int:
        """Requests in the engine."""
        return sum(front.under_way for front in self.fronts)

    def total(self) -> Metrics:
        """The sum of all rows, as of now."""
        return Metrics(memoryview(array("d", map(sum, zip(*self._rows, strict=True)))))


class Exporter(Collector):
    """The text that /metrics answers."""

    def __init__(
        self,
        board: Board,
        stats: Callable[[], EngineStats],
        up: Callable[[], bool],
        startup: Sequence[tuple[str, float]] = (),
    ) -> None:
        """startup: (phase, seconds) of the engine's start."""
        self._startup = startup
        self._board = board
        self._stats = stats
        self._up = up
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats = self._stats()
        yield _gauge("up", "1 while the engine process lives.", self._up())
        yield _gauge("num_requests_running", "Sequences in the batch.", stats.running)
        yield _gauge("num_requests_waiting", "Requests not yet scheduled.", stats.waiting)
        blocks = stats.blocks_total
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.blocks_used / max(1, blocks))
        by_state = GaugeMetricFamily("engine_kv_blocks", "KV blocks by state.", labels=["state"])
        by_state.add_metric(["used"], stats.blocks_used)
        by_state.add_metric(["cached"], stats.blocks_cached)
        by_state.add_metric(["free"], blocks - stats.blocks_used - stats.blocks_cached)
        yield by_state
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield _counter("num_preemptions", "Sequences put back to make room.", stats.preemptions)
        yield _counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield _counter("steps", "Batches run.", stats.steps)
        phases = CounterMetricFamily("engine_phase_seconds", "Seconds spent, by phase of a step.", labels=["phase"])
        for phase, seconds in stats.seconds:
            phases.add_metric([phase], seconds)
        yield phases
        startup = GaugeMetricFamily("engine_startup_seconds", "Seconds that starting took, by phase.", labels=["phase"])
        for phase, seconds in self._startup:
            startup.add_metric([phase], seconds)
        yield startup
        metrics = self._board.total()
        finished = CounterMetricFamily("engine_requests_finished", "Requests by end.", labels=["finish_reason"])
        for reason, count in sorted(metrics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _histogram("time_to_first_token", "From arrival to the first token.", metrics.first_token)
        yield _histogram("inter_token_latency", "Between tokens of one request.", metrics.inter_token)
        yield _histogram("request_queue_time", "From arrival to the first step.", metrics.queue)
        yield _histogram("e2e_request_latency", "From arrival to the end.", metrics.end_to_end)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"engine_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"engine_{name}", text, value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"engine_{name}_seconds", text, buckets=histogram.buckets(), sum_value=histogram.sum)
