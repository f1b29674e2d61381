"""Statistics of the parts of an engine: histograms, the KV cache, speculation."""

from __future__ import annotations

from attrs import frozen


@frozen
class HistogramCounts:
    """The contents of a histogram, whose bucket bounds both sides know."""

    counts: tuple[int, ...] = ()
    """One per bucket, not cumulative; the last one counts values above all bounds. Empty: nothing has been counted."""
    sum: float = 0.0
    """Sum of all values."""


@frozen(kw_only=True)
class CacheStats:
    """What `cache.metrics` measures since the start of one engine.

    The histograms are of the sampled blocks, in seconds, with the bounds RESIDENCY_BOUNDS. In a model of several kinds
    of layers, the blocks at one index of a block table of one kind count as one: they are allocated, reused and evicted
    together.
    """

    sample: float
    """Share of blocks that are sampled."""
    lifetime: HistogramCounts = HistogramCounts()
    """From the allocation of a block to its eviction from the prefix cache."""
    idle_before_evict: HistogramCounts = HistogramCounts()
    """From the last reuse of a block, or from its allocation, to its eviction."""
    reuse_gap: HistogramCounts = HistogramCounts()
    """Between one reuse of a block and the next, for its last four reuses; counted at its eviction."""
    hit_age: HistogramCounts = HistogramCounts()
    """From the allocation of a block to its reuse by a sequence that begins with it."""
    tenants: tuple[tuple[str, int, int], ...] = ()
    """(label, prompt tokens looked up, prompt tokens found) of each tenant."""
    unfilled_slots: int = 0
    """Slots for tokens in the blocks of running sequences that no known token fills."""
    unreachable_slots: int = 0
    """Slots in cached blocks that no sequence can begin with, since a block before them was evicted."""
    total_slots: int = 0
    """Slots of all blocks; a block has `block_size`."""


@frozen(kw_only=True)
class SpeculationStats:
    """What became of the drafts of a speculator, since the start of one engine."""

    verified: tuple[int, ...]
    """Draft tokens that steps have verified, by position; the first position directly follows a known token."""
    accepted: tuple[int, ...]
    """Draft tokens that were accepted, by position; so were all drafts before them. Each saved one decode."""
    faults: int = 0
    """Calls in which the speculator failed or gave an invalid answer; its requests then had no drafts."""
