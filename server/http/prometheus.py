"""Exports the metrics of the server and of each replica as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from engine.server.metrics.definition import Metric, series
from engine.server.metrics.exposition import label_pairs, write
from engine.server.metrics.metric_list import REPLICA_METRICS, SERVER_METRICS
from engine.server.metrics.replica_report import EngineReport, ReplicaReport
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
    ) -> None:
        """engine_reports: returns the report of each replica, in order. max_len: maximum context length, tokens.

        names: server.metrics_names.
        """
        self._metrics = metrics
        self._engine_reports = engine_reports
        self._model = ("model_name", model_name)
        self._max_len = max_len
        self._names = names

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        total = self._metrics.total()
        replicas = [
            ((self._model, ("replica", str(number))), ReplicaReport(engine=engine, requests=requests))
            for number, (engine, requests) in enumerate(zip(self._engine_reports(), total.replicas, strict=True))
        ]
        parts = [self._text(metric, replicas) for metric in REPLICA_METRICS]
        parts += [self._text(metric, [((self._model,), total)]) for metric in SERVER_METRICS]
        return "".join(parts).encode()

    def _text(self, metric: Metric[Source], sources: Sequence[tuple[Iterable[tuple[str, str]], Source]]) -> str:
        """One metric under each of its names. sources: each with the labels that stand before the metric's own."""
        read = [(labels, list(metric.read(source))) for labels, source in sources]
        texts = []
        for one in series(metric, self._names, self._max_len):
            before = ((label_pairs(one.common_labels(labels)), samples) for labels, samples in read)
            samples = ((labels, sample) for labels, found in before for sample in found)
            texts.append(write(one, metric.kind, metric.help, metric.bounds, samples))
        return "".join(texts)
