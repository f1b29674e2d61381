"""Prometheus metrics of the server, in a registry of its own.

What the front ends count stands in a file that all of them map, a row of numbers for each: a front end writes its own
row and reads all, so whichever is asked knows the sums, and a row outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from attrs import frozen
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


@frozen(kw_only=True)
class EngineReport:
    """What is known of one replica of the engine."""

    up: bool
    """Whether its process lives and has started."""
    stats: EngineStats
    startup: Sequence[tuple[str, float]] = ()
    """(phase, seconds) of its latest start."""
    restarts: int = 0
    """How often it was started anew."""


class Exporter(Collector):
    """The text that /metrics answers."""

    def __init__(self, board: Board, engines: Callable[[], Sequence[EngineReport]]) -> None:
        """engines: gives the report of each replica, in order."""
        self._board = board
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        engines = _Engines(self._engines())
        yield engines.gauge("up", "1 while the engine process takes requests.", lambda of: of.up)
        yield engines.counter("restarts", "Engine processes started in a dead one's place.", lambda of: of.restarts)
        yield engines.gauge("num_requests_running", "Sequences in the batch.", lambda of: of.stats.running)
        yield engines.gauge("num_requests_waiting", "Requests not yet scheduled.", lambda of: of.stats.waiting)
        yield engines.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _usage)
        yield engines.by_state()
        yield engines.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda of: of.stats.prefix_queries
        )
        yield engines.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda of: of.stats.prefix_hits
        )
        yield engines.counter("num_preemptions", "Sequences put back to make room.", lambda of: of.stats.preemptions)
        yield engines.counter("prompt_tokens", "Prompt tokens computed.", lambda of: of.stats.prompt_tokens)
        yield engines.counter("generation_tokens", "Tokens generated.", lambda of: of.stats.generation_tokens)
        yield engines.counter("steps", "Batches run.", lambda of: of.stats.steps)
        yield from engines.by_phase()
        metrics = self._board.total()
        finished = CounterMetricFamily("engine_requests_finished", "Requests by end.", labels=["finish_reason"])
        for reason, count in sorted(metrics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _histogram("time_to_first_token", "From arrival to the first token.", metrics.first_token)
        yield _histogram("inter_token_latency", "Between tokens of one request.", metrics.inter_token)
        yield _histogram("request_queue_time", "From arrival to the first step.", metrics.queue)
        yield _histogram("e2e_request_latency", "From arrival to the end.", metrics.end_to_end)


class _Engines:
    """The engines' own numbers: samples of each replica, with the label replica where there are several."""

    def __init__(self, engines: Sequence[EngineReport]) -> None:
        several = len(engines) > 1
        self._label = ["replica"] if several else []
        self._engines = [([str(number)] if several else [], engine) for number, engine in enumerate(engines)]

    def gauge(self, name: str, text: str, value: Callable[[EngineReport], float]) -> Metric:
        """One number of each."""
        return self._fill(GaugeMetricFamily(f"engine_{name}", text, labels=self._label), lambda of: [([], value(of))])

    def counter(self, name: str, text: str, value: Callable[[EngineReport], float]) -> Metric:
        """One number of each that only grows."""
        return self._fill(CounterMetricFamily(f"engine_{name}", text, labels=self._label), lambda of: [([], value(of))])

    def by_state(self) -> Metric:
        """KV blocks."""
        labels = [*self._label, "state"]
        return self._fill(GaugeMetricFamily("engine_kv_blocks", "KV blocks by state.", labels=labels), _blocks)

    def by_phase(self) -> Iterator[Metric]:
        """Where time went."""
        labels = [*self._label, "phase"]
        steps = CounterMetricFamily("engine_phase_seconds", "Seconds spent, by phase of a step.", labels=labels)
        yield self._fill(steps, lambda of: [([phase], seconds) for phase, seconds in of.stats.seconds])
        start = GaugeMetricFamily("engine_startup_seconds", "Seconds that starting took, by phase.", labels=labels)
        yield self._fill(start, lambda of: [([phase], seconds) for phase, seconds in of.startup])

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: Callable[[EngineReport], Iterable[tuple[list[str], float]]],
    ) -> Metric:
        """samples: gives (values of further labels, number)."""
        for replica, engine in self._engines:
            for labels, value in samples(engine):
                family.add_metric([*replica, *labels], value)
        return family


def _blocks(engine: EngineReport) -> list[tuple[list[str], float]]:
    stats = engine.stats
    free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
    return [(["used"], stats.blocks_used), (["cached"], stats.blocks_cached), (["free"], free)]


def _usage(engine: EngineReport) -> float:
    return engine.stats.blocks_used / max(1, engine.stats.blocks_total)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"engine_{name}_seconds", text, buckets=histogram.buckets(), sum_value=histogram.sum)
