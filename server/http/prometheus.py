"""Exports the metrics of the server and of each replica as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from engine.server.metrics.definition import Metric, series
from engine.server.metrics.exposition import label_pairs, write
from engine.server.metrics.metric_list import REPLICA_METRICS
from engine.server.metrics.processes import ProcessReader
from engine.server.metrics.reports import EngineReport, ReplicaReport, Route, ServerReport
from engine.server.metrics.server_metrics import HTTP_METRICS, PROCESS_METRICS, SERVER_METRICS
from engine.server.shared.metrics_table import MetricsTable

Source = TypeVar("Source")


class PrometheusExporter:
    """Builds the text that /metrics answers."""

    def __init__(
        self,
        metrics: MetricsTable,
        engine_reports: Callable[[], Sequence[EngineReport]],
        *,
        model_name: str,
        max_len: int,
        names: str = "engine",
        supervisor: int = 0,
        routes: Callable[[], Sequence[Route]] = tuple,
    ) -> None:
        """engine_reports: returns the report of each replica, in order. max_len: maximum context length, tokens.

        names: server.metrics_names. supervisor: its process ID; 0: there is none. routes: returns the HTTP routes that
        are counted.
        """
        self._metrics = metrics
        self._engine_reports = engine_reports
        self._model = ("model_name", model_name)
        self._max_len = max_len
        self._names = names
        self._routes = routes
        self._processes = ProcessReader(supervisor)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        total, engines = self._metrics.total(), self._engine_reports()
        replicas = [
            ((self._model, ("replica", str(number))), ReplicaReport(engine=engine, requests=requests))
            for number, (engine, requests) in enumerate(zip(engines, total.replicas, strict=True))
        ]
        server = ServerReport(counts=total, routes=self._routes())
        found = self._processes.read((row.pid for row in self._metrics.rows), (engine.pid for engine in engines))
        processes = [((("process", process.role), ("number", process.number)), process) for process in found]
        parts = [self._text(metric, replicas) for metric in REPLICA_METRICS]
        parts += [self._text(metric, [((self._model,), server)]) for metric in SERVER_METRICS]
        parts += [self._text(metric, [((), server)]) for metric in HTTP_METRICS]
        parts += [self._text(metric, processes) for metric in PROCESS_METRICS]
        return "".join(parts).encode()

    def _text(self, metric: Metric[Source], sources: Sequence[tuple[Iterable[tuple[str, str]], Source]]) -> str:
        """One metric under each of its names. sources: each with the labels that stand before the metric's own."""
        named = series(metric, self._names, self._max_len)
        read = [(labels, list(metric.read(source))) for labels, source in sources] if named else []
        texts = []
        for one in named:
            before = ((label_pairs(one.common_labels(labels)), samples) for labels, samples in read)
            samples = ((labels, sample) for labels, found in before for sample in (*found, *one.zeros))
            texts.append(write(one, metric.kind, metric.help, metric.bounds, samples))
        return "".join(texts)
