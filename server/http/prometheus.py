"""Exports the metrics of the server and of each replica as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.types import EngineStats
from engine.server.http.host_metrics import host_metrics
from engine.server.shared.metrics_table import Histogram, MetricsTable


@frozen(kw_only=True)
class EngineReport:
    """State and statistics of one replica."""

    up: bool
    """Whether the replica accepts requests."""
    stats: EngineStats
    startup: Sequence[tuple[str, float]] = ()
    """(phase, seconds) of the latest start."""
    restarts: int = 0
    """Number of restarts."""


class PrometheusExporter(Collector):
    """Builds the text that /metrics answers, from a registry of its own."""

    def __init__(self, metrics: MetricsTable, engine_reports: Callable[[], Sequence[EngineReport]]) -> None:
        """engine_reports: returns the report of each replica, in order."""
        self._metrics = metrics
        self._engine_reports = engine_reports
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry."""
        reports = self._engine_reports()
        engines = _EngineMetrics(reports)
        yield engines.gauge("up", "1 while the engine process accepts requests.", lambda report: report.up)
        yield engines.counter("restarts", "Restarts of the engine process.", lambda report: report.restarts)
        yield engines.gauge("num_requests_running", "Sequences in the batch.", lambda report: report.stats.running)
        yield engines.gauge("num_requests_waiting", "Requests not yet scheduled.", lambda report: report.stats.waiting)
        yield engines.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _usage)
        yield engines.by_state()
        yield from engines.by_kind()
        yield engines.counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            lambda report: report.stats.prefix_queries,
        )
        yield engines.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda report: report.stats.prefix_hits
        )
        yield engines.counter(
            "num_preemptions", "Sequences preempted to free KV blocks.", lambda report: report.stats.preemptions
        )
        yield engines.counter("prompt_tokens", "Prompt tokens computed.", lambda report: report.stats.prompt_tokens)
        yield engines.counter("generation_tokens", "Tokens generated.", lambda report: report.stats.generation_tokens)
        yield engines.counter("steps", "Steps run.", lambda report: report.stats.steps)
        yield engines.counter(
            "kernels_compiled",
            "Kernels compiled or loaded while serving, which delays requests.",
            lambda report: report.stats.kernels_compiled,
        )
        yield engines.counter(
            "graphs_captured",
            "CUDA graphs captured while serving, which delays requests.",
            lambda report: report.stats.graphs_captured,
        )
        yield engines.counter(
            "policy_faults",
            "Decisions made first come, first served because the scheduling policy failed.",
            lambda report: report.stats.policy_faults,
        )
        yield from engines.by_phase()
        metrics = self._metrics.total()
        yield GaugeMetricFamily("engine_connections", "Open client connections.", value=metrics.connections)
        dropped = CounterMetricFamily(
            "engine_connections_dropped", "Connections that the server closed early, by reason.", labels=["reason"]
        )
        for drop_reason, count in sorted(metrics.dropped.items()):
            dropped.add_metric([drop_reason], count)
        yield dropped
        finished = CounterMetricFamily(
            "engine_requests_finished", "Finished requests by finish reason.", labels=["finish_reason"]
        )
        for reason, count in sorted(metrics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield from host_metrics(metrics, [report.stats for report in reports])
        yield _histogram("time_to_first_token", "From arrival to the first token.", metrics.time_to_first_token)
        yield _histogram("inter_token_latency", "Between tokens of one request.", metrics.inter_token_latency)
        yield _histogram("request_queue_time", "From arrival to the first step.", metrics.queue_time)
        yield _histogram("e2e_request_latency", "From arrival to finish.", metrics.request_latency)


class _EngineMetrics:
    """Metrics of the engines: one sample per replica, labelled `replica` if there are several."""

    def __init__(self, engines: Sequence[EngineReport]) -> None:
        several = len(engines) > 1
        self._label = ["replica"] if several else []
        self._engines = [([str(number)] if several else [], engine) for number, engine in enumerate(engines)]

    def gauge(self, name: str, text: str, value: Callable[[EngineReport], float]) -> Metric:
        """A gauge with one sample per replica."""
        return self._fill(
            GaugeMetricFamily(f"engine_{name}", text, labels=self._label), lambda report: [([], value(report))]
        )

    def counter(self, name: str, text: str, value: Callable[[EngineReport], float]) -> Metric:
        """A counter with one sample per replica."""
        return self._fill(
            CounterMetricFamily(f"engine_{name}", text, labels=self._label), lambda report: [([], value(report))]
        )

    def by_state(self) -> Metric:
        """The number of KV blocks in each state."""
        labels = [*self._label, "state"]
        return self._fill(GaugeMetricFamily("engine_kv_blocks", "KV blocks by state.", labels=labels), _blocks)

    def by_kind(self) -> Iterator[Metric]:
        """The number of KV blocks that each kind of layers holds, for models of several kinds."""
        if any(report.stats.blocks_by_kind for _, report in self._engines):
            labels = [*self._label, "kind", "state"]
            text = "KV blocks held by each kind of layers, by state."
            yield self._fill(GaugeMetricFamily("engine_kv_blocks_by_kind", text, labels=labels), _blocks_by_kind)

    def by_phase(self) -> Iterator[Metric]:
        """The time spent in each phase, of steps and of the start."""
        labels = [*self._label, "phase"]
        steps = CounterMetricFamily("engine_phase_seconds", "Seconds spent, by phase of a step.", labels=labels)
        yield self._fill(steps, lambda report: [([phase], seconds) for phase, seconds in report.stats.seconds])
        start = GaugeMetricFamily("engine_startup_seconds", "Seconds spent in each phase of the start.", labels=labels)
        yield self._fill(start, lambda report: [([phase], seconds) for phase, seconds in report.startup])

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: Callable[[EngineReport], Iterable[tuple[list[str], float]]],
    ) -> Metric:
        """Add samples to `family`; samples: returns (values of further labels, number) pairs of a replica."""
        for replica, engine in self._engines:
            for labels, value in samples(engine):
                family.add_metric([*replica, *labels], value)
        return family


def _blocks(engine: EngineReport) -> list[tuple[list[str], float]]:
    stats = engine.stats
    free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
    return [(["used"], stats.blocks_used), (["cached"], stats.blocks_cached), (["free"], free)]


def _blocks_by_kind(engine: EngineReport) -> Iterator[tuple[list[str], float]]:
    for kind, used, cached in engine.stats.blocks_by_kind:
        yield [kind, "used"], used
        yield [kind, "cached"], cached


def _usage(engine: EngineReport) -> float:
    return engine.stats.blocks_used / max(1, engine.stats.blocks_total)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"engine_{name}_seconds", text, buckets=histogram.buckets(), sum_value=histogram.sum)
