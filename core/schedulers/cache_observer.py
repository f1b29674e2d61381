"""What a block manager reports while it allocates, reuses and evicts blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers.hash_chain import HashChain


class CacheObserver:
    """Is notified of changes of the KV cache; each method here does nothing.

    An entry is what a block table holds at one index: a block, or as many as its kind of layers has groups, known by
    the number of the first. A kind is given by its index in CacheInfo.kinds. Entries that change together are reported
    together, since thousands change per second.
    """

    def allocated(self, entries: Sequence[int]) -> None:
        """A sequence has got entries for new tokens."""

    def reused(self, entries: Sequence[int]) -> None:
        """A new sequence begins with these entries of earlier sequences."""

    def stored(self, kind: int, entries: Sequence[int], tokens: Sequence[int], chain: HashChain, first: int) -> None:
        """Entries can be found in the prefix cache; their tokens may still be computed by a step in progress.

        They are consecutive full blocks of `tokens`, from index `first` on, whose digests `chain` computes.
        """

    def evicted(self, entries: Sequence[int]) -> None:
        """Cached entries are removed, because their blocks are needed; `removed` follows."""

    def removed(self, kind: int, digests: Sequence[bytes]) -> None:
        """The entries with these digests can no longer be found in the prefix cache."""

    def cleared(self) -> None:
        """No entry can be found any more."""


class CacheObservers(CacheObserver):
    """Notifies several observers, in order."""

    def __init__(self, observers: Sequence[CacheObserver]) -> None:
        self._observers = tuple(observers)

    def allocated(self, entries: Sequence[int]) -> None:
        for observer in self._observers:
            observer.allocated(entries)

    def reused(self, entries: Sequence[int]) -> None:
        for observer in self._observers:
            observer.reused(entries)

    def stored(self, kind: int, entries: Sequence[int], tokens: Sequence[int], chain: HashChain, first: int) -> None:
        for observer in self._observers:
            observer.stored(kind, entries, tokens, chain, first)

    def evicted(self, entries: Sequence[int]) -> None:
        for observer in self._observers:
            observer.evicted(entries)

    def removed(self, kind: int, digests: Sequence[bytes]) -> None:
        for observer in self._observers:
            observer.removed(kind, digests)

    def cleared(self) -> None:
        for observer in self._observers:
            observer.cleared()


def join_observers(observers: Sequence[CacheObserver]) -> CacheObserver | None:
    """One observer that stands for all; None for none, which costs a block manager nothing."""
    if len(observers) < 2:
        return observers[0] if observers else None
    return CacheObservers(observers)
