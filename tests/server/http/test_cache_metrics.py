"""The metrics that `cache.metrics` and `kv_events.endpoint` turn on, at /metrics."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.core.histogram import RESIDENCY_BOUNDS
from engine.core.types import CacheStats, EngineStats, HistogramCounts
from engine.server.http.prometheus import PrometheusExporter
from engine.server.metrics.cache_metrics import CACHE_METRICS
from engine.server.metrics.reports import EngineReport
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable


def exported(names: str = "engine", **stats: Any) -> dict[tuple[str, str], float]:
    """Samples by name and value of their own label."""
    table = MetricsTable([memoryview(array("d", [0.0] * FrontEndMetrics.size(1)))])
    report = EngineReport(up=True, stats=EngineStats(**stats))
    exporter = PrometheusExporter(table, lambda: [report], model_name="m", max_len=64, names=names)
    return {
        (sample.name, "".join(sample.labels.get(name, "") for name in ("le", "reason", "tenant"))): sample.value
        for family in text_string_to_metric_families(exporter.text().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(("names", "prefix"), [("engine", "engine_"), ("vllm", "vllm:")])
def test_cache_metrics_are_exported_when_they_are_on(names: str, prefix: str) -> None:
    counts = [0] * (len(RESIDENCY_BOUNDS) + 1)
    counts[2], counts[-1] = 3, 1
    cache = CacheStats(
        sample=0.25,
        lifetime=HistogramCounts(tuple(counts), 4000.5),
        tenants=(("unsalted", 10, 4), ("0badcafe", 6, 6)),
        unfilled_slots=10,
        unreachable_slots=5,
        total_slots=100,
    )
    found = exported(names, cache=cache)
    name = f"{prefix}kv_block_lifetime_seconds"
    assert (found[f"{name}_bucket", "0.002"], found[f"{name}_bucket", "0.005"]) == (0, 3)
    assert (found[f"{name}_bucket", "1800.0"], found[f"{name}_bucket", "+Inf"]) == (3, 4)
    assert (found[f"{name}_count", ""], found[f"{name}_sum", ""]) == (4, 4000.5)
    for other in ("idle_before_evict", "reuse_gap"):
        assert found[f"{prefix}kv_block_{other}_seconds_count", ""] == 0
    assert found["engine_kv_block_hit_age_seconds_count", ""] == 0
    assert found["engine_kv_block_sample", ""] == 0.25
    assert found["engine_kv_fragmentation", "unfilled"] == 0.1
    assert found["engine_kv_fragmentation", "unreachable"] == 0.05
    assert found["engine_prefix_cache_tenant_queries_total", "0badcafe"] == 6
    assert found["engine_prefix_cache_tenant_hits_total", "unsalted"] == 4


def test_batches_of_events_are_counted_when_they_are_published() -> None:
    found = exported(kv_events=(12, 2))
    assert found["engine_kv_event_batches_total", ""] == 12
    assert found["engine_kv_event_batches_dropped_total", ""] == 2


def test_cache_metrics_are_absent_when_they_are_off() -> None:
    names = {name for name, _ in exported()}
    assert not [metric.name for metric in CACHE_METRICS if any(metric.name in name for name in names)]
