"""Plain data on the KV cache's contents: how long blocks stay, when they are used again, and what room is lost."""

from __future__ import annotations

from attrs import frozen

RESIDENCY_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper bounds of the buckets of Durations, seconds."""


@frozen
class Durations:
    """A histogram of durations."""

    counts: tuple[int, ...] = (0,) * (len(RESIDENCY_BOUNDS) + 1)
    """Durations per bucket of RESIDENCY_BOUNDS, and beyond the last bound."""
    sum: float = 0.0
    """Sum of all durations, seconds."""


@frozen(kw_only=True)
class CacheStats:
    """What `cache.metrics` measures since the start of one engine.

    The histograms are of the sampled blocks. In a model of several kinds of layers, the blocks at one index of a block
    table of one kind count as one: they are allocated, reused and evicted together.
    """

    sample: float
    """Share of blocks that are sampled."""
    lifetime: Durations
    """From the allocation of a block to its eviction from the prefix cache."""
    idle_before_evict: Durations
    """From the last reuse of a block, or from its allocation, to its eviction."""
    reuse_gap: Durations
    """Between the last reuses of a block; counted at its eviction."""
    hit_age: Durations
    """From the allocation of a block to its reuse by a sequence that begins with it."""
    tenants: tuple[tuple[str, int, int], ...] = ()
    """(label, prompt tokens looked up, prompt tokens found) of each tenant."""
    unfilled_slots: int = 0
    """Slots for tokens in the blocks of running sequences that no known token fills."""
    unreachable_slots: int = 0
    """Slots in cached blocks that no sequence can begin with, since a block before them was evicted."""
    total_slots: int = 0
    """Slots of all blocks; a block has `block_size`."""
