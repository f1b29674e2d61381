from __future__ import annotations

from array import array

from prometheus_client.parser import text_string_to_metric_families

from engine.core.cache_stats import RESIDENCY_BOUNDS, CacheStats, Durations
from engine.core.types import EngineStats
from engine.server.http.prometheus import EngineReport, PrometheusExporter
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable


def exported(*replicas: CacheStats | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels of a server with these replicas."""
    table = MetricsTable([memoryview(array("d", [0.0] * (FrontEndMetrics.SIZE + len(replicas))))])
    reports = [EngineReport(up=True, stats=EngineStats(cache=cache)) for cache in replicas]
    text = PrometheusExporter(table, lambda: reports).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def measured(**fields: object) -> CacheStats:
    empty = Durations()
    defaults: dict[str, object] = dict.fromkeys(("lifetime", "idle_before_evict", "reuse_gap", "hit_age"), empty)
    return CacheStats(sample=0.25, **{**defaults, **fields})  # type: ignore[arg-type]


def test_cache_metrics_are_exported_when_they_are_on() -> None:
    counts = [0] * (len(RESIDENCY_BOUNDS) + 1)
    counts[2], counts[-1] = 3, 1
    cache = measured(
        lifetime=Durations(tuple(counts), 4000.5),
        tenants=(("unsalted", 10, 4), ("0badcafe", 6, 6)),
        unfilled_slots=10,
        unreachable_slots=5,
        total_slots=100,
    )
    found = exported(cache)
    name = "engine_kv_block_lifetime_seconds"
    assert found[f"{name}_bucket", (("le", "0.002"),)] == 0
    assert found[f"{name}_bucket", (("le", "0.005"),)] == 3
    assert found[f"{name}_bucket", (("le", "1800.0"),)] == 3
    assert found[f"{name}_bucket", (("le", "+Inf"),)] == found[f"{name}_count", ()] == 4
    assert found[f"{name}_sum", ()] == 4000.5
    for other in ("idle_before_evict", "reuse_gap", "hit_age"):
        assert found[f"engine_kv_block_{other}_seconds_count", ()] == 0
    assert found["engine_kv_block_sample", ()] == 0.25
    assert found["engine_kv_fragmentation", (("reason", "unfilled"),)] == 0.1
    assert found["engine_kv_fragmentation", (("reason", "unreachable"),)] == 0.05
    assert found["engine_prefix_cache_tenant_queries_total", (("tenant", "0badcafe"),)] == 6
    assert found["engine_prefix_cache_tenant_hits_total", (("tenant", "unsalted"),)] == 4


def test_cache_metrics_have_a_label_for_the_replica_when_there_are_several() -> None:
    found = exported(measured(), measured(unfilled_slots=1, total_slots=2))
    assert found["engine_kv_fragmentation", (("reason", "unfilled"), ("replica", "1"))] == 0.5
    assert found["engine_kv_block_hit_age_seconds_count", (("replica", "0"),)] == 0


def test_cache_metrics_are_not_exported_when_they_are_off() -> None:
    assert not [name for name, _ in exported(None) if name.startswith(("engine_kv_block_", "engine_prefix_cache_ten"))]
