"""Prometheus text of the server's metrics, from a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.types import EngineStats
from engine.server.shared.metrics_table import Board, Histogram


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
