"""Block tables of sequences in several kinds of layers, and cached prefixes; for GroupedBlockManager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.schedulers.block_manager import Shortage


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


class GroupedShortage(Shortage):
    """How many blocks are missing for one new sequence, counted by entries of block tables."""

    __slots__ = ("_blocks_of", "_sequences")

    def __init__(
        self,
        missing: int,
        cached: Sequence[int],
        references: Sequence[int],
        sequences: Mapping[int, SequenceTables],
        blocks_of: Sequence[tuple[int, ...]],
    ) -> None:
        """missing: blocks. blocks_of: by entry."""
        self._cached = cached
        self._references = references
        self._sequences = sequences
        self._blocks_of = blocks_of
        self._released: dict[int, int] = {}
        self.blocks = missing

    def release(self, sequence: int) -> None:
        self._cached = frozenset(self._cached)
        for table in self._sequences[sequence].tables:
            for entry in table.entries:
                count = self._released[entry] = self._released.get(entry, 0) + 1
                if count == self._references[entry] and entry not in self._cached:
                    self.blocks -= len(self._blocks_of[entry])
