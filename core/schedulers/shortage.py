"""Counts the blocks that are missing for a waiting request, by block manager; for admission and preemption."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.schedulers.block_manager import BlockManager, BlockTable
    from engine.core.schedulers.kind_tables import SequenceTables


class Shortage:
    """How many blocks are missing for one new sequence if some other sequences were freed first; frees nothing.

    blocks: the number; negative if some are left over. Valid until a block is allocated or freed.
    """

    __slots__ = ("_cached", "_references", "_released", "_tables", "blocks")

    def __init__(
        self,
        manager: BlockManager,
        wanted: int,
        cached: Sequence[int],
        references: Sequence[int],
        tables: Mapping[int, BlockTable],
    ) -> None:
        """wanted: the sequence's blocks, of which `cached` are there already."""
        self._cached: Collection[int] = cached
        self._references = references
        self._tables = tables
        self._released: dict[int, int] = {}  # references of the sequences freed, by block
        revived = [references[block] for block in cached].count(0)  # available, but not for other content
        self.blocks = wanted - len(cached) - (manager.num_available - revived)

    def release(self, sequence: int) -> None:
        """Count as if the sequence were freed, too."""
        self._cached = frozenset(self._cached)
        for block in self._tables[sequence].blocks:
            count = self._released[block] = self._released.get(block, 0) + 1
            self.blocks -= count == self._references[block] and block not in self._cached


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
