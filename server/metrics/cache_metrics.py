"""The metrics of what `cache.metrics` measures, and of the stream of events of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.histogram import RESIDENCY_BOUNDS
from engine.core.types import CacheStats, HistogramCounts
from engine.server.metrics.definition import Kind, Metric, Sample, VllmName
from engine.server.metrics.reports import ReplicaReport


def _measured(
    kind: Kind, name: str, text: str, read: Callable[[CacheStats], Iterable[Sample]], *labels: str
) -> Metric[ReplicaReport]:
    """A metric that exists if `cache.metrics` is on."""

    def present(report: ReplicaReport) -> Iterable[Sample]:
        cache = report.engine.stats.cache
        return [] if cache is None else read(cache)

    return Metric(name=name, kind=kind, help=text, labels=labels, read=present)


def _of_blocks(
    name: str, text: str, read: Callable[[CacheStats], HistogramCounts], *, vllm: bool
) -> Metric[ReplicaReport]:
    """A histogram of the sampled blocks. vllm: whether vLLM has it."""

    def present(report: ReplicaReport) -> list[Sample]:
        cache = report.engine.stats.cache
        return [] if cache is None else [((), read(cache))]

    return Metric(
        name=name,
        kind="histogram",
        help=text,
        read=present,
        bounds=RESIDENCY_BOUNDS,
        vllm=VllmName(name=name) if vllm else None,
    )


def _events(number: int) -> Callable[[ReplicaReport], list[Sample]]:
    """Reads one of the two numbers of EngineStats.kv_events."""

    def present(report: ReplicaReport) -> list[Sample]:
        events = report.engine.stats.kv_events
        return [] if events is None else [((), events[number])]

    return present


def _fragmentation(cache: CacheStats) -> list[Sample]:
    total = max(1, cache.total_slots)
    return [(("unfilled",), cache.unfilled_slots / total), (("unreachable",), cache.unreachable_slots / total)]


CACHE_METRICS: tuple[Metric[ReplicaReport], ...] = (
    _of_blocks(
        "kv_block_lifetime_seconds",
        "From the allocation of a sampled KV block to its eviction from the prefix cache.",
        lambda cache: cache.lifetime,
        vllm=True,
    ),
    _of_blocks(
        "kv_block_idle_before_evict_seconds",
        "From the last reuse of a sampled KV block, or from its allocation, to its eviction.",
        lambda cache: cache.idle_before_evict,
        vllm=True,
    ),
    _of_blocks(
        "kv_block_reuse_gap_seconds",
        "Between the last four reuses of a sampled KV block; counted at its eviction.",
        lambda cache: cache.reuse_gap,
        vllm=True,
    ),
    _of_blocks(
        "kv_block_hit_age_seconds",
        "From the allocation of a sampled KV block to its reuse, at each reuse.",
        lambda cache: cache.hit_age,
        vllm=False,
    ),
    _measured("gauge", "kv_block_sample", "Share of KV blocks that are sampled.", lambda cache: [((), cache.sample)]),
    _measured(
        "gauge",
        "kv_fragmentation",
        "Share of the KV cache's token slots that are allocated but of no use, by reason.",
        _fragmentation,
        "reason",
    ),
    _measured(
        "counter",
        "prefix_cache_tenant_queries",
        "Prompt tokens looked up in the prefix cache, by tenant.",
        lambda cache: [((tenant,), queries) for tenant, queries, _ in cache.tenants],
        "tenant",
    ),
    _measured(
        "counter",
        "prefix_cache_tenant_hits",
        "Prompt tokens found in the prefix cache, by tenant.",
        lambda cache: [((tenant,), hits) for tenant, _, hits in cache.tenants],
        "tenant",
    ),
    Metric(
        name="kv_event_batches",
        kind="counter",
        help="Batches of events of the KV cache, those dropped included.",
        read=_events(0),
    ),
    Metric(
        name="kv_event_batches_dropped",
        kind="counter",
        help="Batches of events of the KV cache dropped because too many waited to be sent.",
        read=_events(1),
    ),
)
"""Metrics whose measurement is off export nothing."""
