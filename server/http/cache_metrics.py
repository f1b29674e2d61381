"""The metrics of the KV cache that `cache.metrics` turns on, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.core.cache_stats import RESIDENCY_BOUNDS, CacheStats, Durations

_BOUNDS = (*map(str, RESIDENCY_BOUNDS), "+Inf")
_HISTOGRAMS = (
    ("block_lifetime", "From the allocation of a sampled KV block to its eviction.", "lifetime"),
    (
        "block_idle_before_evict",
        "From the last reuse of a sampled KV block, or its allocation, to its eviction.",
        "idle_before_evict",
    ),
    ("block_reuse_gap", "Between the last reuses of a sampled KV block, counted at its eviction.", "reuse_gap"),
    ("block_hit_age", "From the allocation of a sampled KV block to each reuse of it.", "hit_age"),
)
"""Name, help and field of CacheStats."""


def cache_metrics(replicas: Sequence[tuple[list[str], CacheStats | None]], labels: Sequence[str]) -> list[Metric]:
    """The metrics of all replicas; none if `cache.metrics` is off.

    replicas: values of the labels `labels`, and what the replica has measured.
    """
    measured = [(values, stats) for values, stats in replicas if stats is not None]
    if not measured:
        return []
    families: list[Metric] = []
    for name, text, field in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"engine_kv_{name}_seconds", text, labels=labels)
        for values, stats in measured:
            durations: Durations = getattr(stats, field)
            counts = zip(_BOUNDS, accumulate(map(float, durations.counts)), strict=True)
            histogram.add_metric(values, list(counts), durations.sum)
        families.append(histogram)
    sample = GaugeMetricFamily("engine_kv_block_sample", "Share of KV blocks that are sampled.", labels=labels)
    fragmentation = GaugeMetricFamily(
        "engine_kv_fragmentation",
        "Share of the KV cache's room for tokens that is allocated and of no use, by reason.",
        labels=[*labels, "reason"],
    )
    queries, hits = (
        CounterMetricFamily(f"engine_prefix_cache_tenant_{name}", text, labels=[*labels, "tenant"])
        for name, text in (
            ("queries", "Prompt tokens looked up in the prefix cache, by tenant."),
            ("hits", "Prompt tokens found in the prefix cache, by tenant."),
        )
    )
    for values, stats in measured:
        sample.add_metric(values, stats.sample)
        total = max(1, stats.total_slots)
        fragmentation.add_metric([*values, "unfilled"], stats.unfilled_slots / total)
        fragmentation.add_metric([*values, "unreachable"], stats.unreachable_slots / total)
        for tenant, queried, found in stats.tenants:
            queries.add_metric([*values, tenant], queried)
            hits.add_metric([*values, tenant], found)
    return [*families, sample, fragmentation, queries, hits]
