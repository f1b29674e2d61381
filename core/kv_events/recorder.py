"""Records what enters and leaves the prefix cache, in order."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from engine.core.schedulers.cache_observer import CacheObserver
from engine.core.schedulers.growing_tokens import GrowingTokens
from engine.core.schedulers.hash_chain import HashChain
from engine.core.tokens import Tokens, packed


@define
class Stored:
    """Consecutive blocks of one sequence that entered the prefix cache, in one kind of layers."""

    kind: int
    """Index in CacheInfo.kinds."""
    parent: bytes | None
    """Digest of the block before the first one; None: the sequence begins with the first one."""
    salt: str
    """Request.salt of the sequence."""
    digests: list[bytes] = field(factory=list)
    tokens: list[bytes] = field(factory=list)
    """Token ids of one or several blocks each, packed (core/tokens.py)."""


@define
class Removed:
    """Blocks that left the prefix cache, of one kind of layers."""

    kind: int
    digests: list[bytes] = field(factory=list)


@define
class Cleared:
    """The prefix cache was emptied."""


Change = Stored | Removed | Cleared


class EventRecorder(CacheObserver):
    """Keeps the changes since they were last taken; consecutive ones of a kind are one change."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changes: list[Change] = []

    def take(self) -> list[Change]:
        """The changes since the last call."""
        changes = self._changes
        if changes:
            self._changes = []
        return changes

    def stored(self, kind: int, entries: Sequence[int], tokens: Sequence[int], chain: HashChain, first: int) -> None:
        parent = chain.digest(tokens, first - 1) if first else None
        last = self._changes[-1] if self._changes else None
        if not (isinstance(last, Stored) and last.kind == kind and last.digests[-1] == parent):
            last = Stored(kind, parent, chain.salt)
            self._changes.append(last)
        begin, end = first * self._block_size, (first + len(entries)) * self._block_size
        last.digests += chain.between(tokens, first, first + len(entries))
        last.tokens.append(
            tokens.packed(begin, end) if isinstance(tokens, (GrowingTokens, Tokens)) else packed(tokens[begin:end])
        )

    def removed(self, kind: int, digests: Sequence[bytes]) -> None:
        last = self._changes[-1] if self._changes else None
        if not (isinstance(last, Removed) and last.kind == kind):
            last = Removed(kind)
            self._changes.append(last)
        last.digests += digests

    def cleared(self) -> None:
        self._changes.append(Cleared())
