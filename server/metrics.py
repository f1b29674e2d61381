"""Prometheus metrics of the server, in a registry of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.types import EngineStats, RequestTimes

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets, seconds."""


class Histogram:
    """Counts of durations; cheap enough to be fed once a token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration, or the same one several times."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of durations up to it), as Prometheus wants them."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets

    @property
    def sum(self) -> float:
        """All durations together, seconds."""
        return self._sum


class Metrics:
    """What the front end measures itself; the engine's own numbers come with EngineStats."""

    def __init__(self) -> None:
        self.first_token = Histogram(LONG)
        self.inter_token = Histogram(SHORT)
        self.queue = Histogram(LONG)
        self.end_to_end = Histogram(LONG)
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)

    def tokens(self, seconds: float, count: int, first: bool) -> None:
        """`count` tokens of one request came `seconds` after the ones before, or, with `first`, after its arrival."""
        if first:
            self.first_token.observe(seconds)
        else:
            self.inter_token.observe(seconds / count, count)

    def finish(self, reason: str, times: RequestTimes | None, seconds: float) -> None:
        """A request finished `seconds` after its arrival."""
        self.finished[reason] += 1
        self.end_to_end.observe(seconds)
        if times is not None:
            self.queue.observe(max(0.0, times.scheduled - times.arrival))


class Exporter(Collector):
    """The text that /metrics answers."""

    def __init__(
        self,
        metrics: Metrics,
        stats: Callable[[], EngineStats],
        up: Callable[[], bool],
        startup: Sequence[tuple[str, float]] = (),
    ) -> None:
        """startup: (phase, seconds) of the engine's start."""
        self._startup = startup
        self._metrics = metrics
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
        finished = CounterMetricFamily("engine_requests_finished", "Requests by end.", labels=["finish_reason"])
        for reason, count in sorted(self._metrics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _histogram("time_to_first_token", "From arrival to the first token.", self._metrics.first_token)
        yield _histogram("inter_token_latency", "Between tokens of one request.", self._metrics.inter_token)
        yield _histogram("request_queue_time", "From arrival to the first step.", self._metrics.queue)
        yield _histogram("e2e_request_latency", "From arrival to the end.", self._metrics.end_to_end)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"engine_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"engine_{name}", text, value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"engine_{name}_seconds", text, buckets=histogram.buckets(), sum_value=histogram.sum)
