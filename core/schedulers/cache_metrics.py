"""Measures how long blocks stay in the KV cache, when they are reused, and the hits of each tenant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from random import Random

from engine.core.histogram import RESIDENCY_BOUNDS, Histogram
from engine.core.schedulers.cache_observer import CacheObserver
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.prefix_tree import PrefixTree
from engine.core.types import FULL, BlockKind, CacheStats

REUSES = 4
"""Reuses of a block that are remembered, as in vLLM."""
MAX_TENANTS = 32
"""Salts that have a label of their own; further ones share OTHER_TENANTS."""
NO_TENANT = "unsalted"
"""Label of requests without a salt."""
OTHER_TENANTS = "other"


class _Record:
    """A sampled entry: when it was allocated and when it was last reused."""

    __slots__ = ("allocated", "reuses")

    def __init__(self, now: float) -> None:
        self.allocated = now
        self.reuses: deque[float] | None = None


class CacheMetrics(CacheObserver):
    """Histograms of sampled blocks, hits by tenant, and the entries that no sequence can reach.

    A tenant is a salt (Request.salt): requests share the prefix cache only within one.
    """

    def __init__(
        self,
        kinds: Sequence[BlockKind] = (FULL,),
        *,
        sample: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """sample: share of blocks that are sampled, drawn at each allocation. clock: returns seconds."""
        self._kinds = kinds
        self._trees = [None if kind.window is not None else PrefixTree() for kind in kinds]
        self._sample = sample
        self._random = Random(seed)
        self._clock = clock
        self._records: dict[int, _Record] = {}
        self._lifetime, self._idle, self._reuse_gap, self._hit_age = (Histogram(RESIDENCY_BOUNDS) for _ in range(4))
        self._tenants: dict[str, list[int]] = {}  # by salt: prompt tokens looked up and found
        self._others = [0, 0]

    def allocated(self, entries: Sequence[int]) -> None:
        records, draw, sample = self._records, self._random.random, self._sample
        for entry in entries:
            if entry in records:  # of content that was not cached, or removed for another reason than its eviction
                del records[entry]
            if draw() < sample:
                records[entry] = _Record(self._clock())

    def reused(self, entries: Sequence[int]) -> None:
        sampled = self._records.keys() & entries
        if not sampled:
            return
        now = self._clock()
        for entry in sampled:
            record = self._records[entry]
            self._hit_age.observe(now - record.allocated)
            if record.reuses is None:
                record.reuses = deque(maxlen=REUSES)
            record.reuses.append(now)

    def evicted(self, entries: Sequence[int]) -> None:
        for entry in entries:
            if entry in self._records:
                self._observe_end(self._records.pop(entry))

    def _observe_end(self, record: _Record) -> None:
        now, reuses = self._clock(), record.reuses or ()
        self._lifetime.observe(now - record.allocated)
        self._idle.observe(now - (reuses[-1] if reuses else record.allocated))
        for earlier, later in pairwise(reuses):
            self._reuse_gap.observe(later - earlier)

    def stored(self, kind: int, entries: Sequence[int], tokens: Sequence[int], chain: HashChain, first: int) -> None:
        tree = self._trees[kind]
        if tree is not None:
            parent = chain.digest(tokens, first - 1) if first else None
            tree.add(entries, chain.between(tokens, first, first + len(entries)), parent)

    def removed(self, kind: int, digests: Sequence[bytes]) -> None:
        tree = self._trees[kind]
        if tree is not None:
            tree.remove(digests)

    def cleared(self) -> None:
        for tree in self._trees:
            if tree is not None:
                tree.clear()

    def unreachable(self) -> Iterator[tuple[int, Collection[int]]]:
        """Blocks per entry and the unreachable entries, of each kind that keeps the whole context.

        In a kind with a window any entry may be the last of a reusable prefix, so none counts as unreachable.
        """
        for kind, tree in zip(self._kinds, self._trees, strict=True):
            if tree is not None:
                yield kind.groups, tree.unreachable

    def count_queries(self, salt: str, tokens: int) -> None:
        """Count prompt tokens of a tenant that are looked up in the prefix cache."""
        self._tenant(salt)[0] += tokens

    def count_hits(self, salt: str, tokens: int) -> None:
        """Count prompt tokens of a tenant that were found there."""
        self._tenant(salt)[1] += tokens

    def stats(self, *, unfilled_slots: int, unreachable_slots: int, total_slots: int) -> CacheStats:
        """All measurements so far, and the slots that the caller has counted."""
        tenants = [(tenant_label(salt), queries, hits) for salt, (queries, hits) in self._tenants.items()]
        if any(self._others):
            tenants.append((OTHER_TENANTS, self._others[0], self._others[1]))
        return CacheStats(
            sample=self._sample,
            lifetime=self._lifetime.snapshot(),
            idle_before_evict=self._idle.snapshot(),
            reuse_gap=self._reuse_gap.snapshot(),
            hit_age=self._hit_age.snapshot(),
            tenants=tuple(tenants),
            unfilled_slots=unfilled_slots,
            unreachable_slots=unreachable_slots,
            total_slots=total_slots,
        )

    def _tenant(self, salt: str) -> list[int]:
        """Tokens looked up and found of a tenant: a list of two."""
        counts = self._tenants.get(salt)
        if counts is None:
            if len(self._tenants) >= MAX_TENANTS:
                return self._others
            counts = self._tenants[salt] = [0, 0]
        return counts


def tenant_label(salt: str) -> str:
    """The name of a tenant in metrics: 8 hexadecimal digits of a digest, which do not reveal the salt."""
    return blake2b(salt.encode(), digest_size=4).hexdigest() if salt else NO_TENANT
