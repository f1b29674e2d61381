"""Block tables of sequences in several kinds of layers, and cached prefixes; for GroupedBlockManager."""

from __future__ import annotations

from collections.abc import Sequence


class CachedPrefix(list[int]):
    """Entries of a prefix that are indexed, kind after kind; from `GroupedBlockManager.lookup`.

    length: indices of the prefix. next_index: see BlockManager.next_block; -1: any entry indexed may extend the prefix.
    """

    __slots__ = ("by_kind", "length", "next_index")

    def __init__(self, by_kind: Sequence[Sequence[int]], length: int, next_index: int | None) -> None:
        super().__init__(entry for entries in by_kind for entry in entries)
        self.by_kind = by_kind
        self.length = length if self else 0
        self.next_index = next_index


class KindTable:
    """The block table of one sequence in one kind: an entry per index from `first` on.

    indexed: the entries before this index are indexed, or equal others that are, or are given up.
    """

    __slots__ = ("entries", "first", "indexed")

    def __init__(self, first: int, entries: list[int], indexed: int) -> None:
        self.first = first
        self.entries = entries
        self.indexed = indexed

    @property
    def end(self) -> int:
        """Index behind the last entry."""
        return self.first + len(self.entries)


class SequenceTables:
    """The block tables of one sequence.

    length: indices that its tokens fill. cached: indices of the prefix that it began with. pending: digests of its
    prompt that are not computed yet, by index.
    """

    __slots__ = ("cached", "length", "pending", "tables")

    def __init__(self, tables: list[KindTable], length: int, cached: int) -> None:
        self.tables = tables
        self.length = length
        self.cached = cached
        self.pending: dict[int, bytes] = {}
