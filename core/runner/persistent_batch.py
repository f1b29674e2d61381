"""The persistent batch: the runner's state of each running sequence between steps, on the host and on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from engine.core.types import Step


@define
class _RunningSequence:
    """A sequence in the persistent batch."""

    row: int
    tokens: npt.NDArray[np.int32]
    """[known tokens]: prompt, and output computed before a preemption."""
    num_blocks: int = 0
    """Entries in the sequence's row of the block table, if there is one table."""
    lengths: list[int] = field(factory=list)
    """Per kind of layers, entries in the sequence's rows of the block tables, if there are several tables."""


class PersistentBatch:
    """The running sequences, each in a row of its own from its admission until it finishes or is preempted.

    Except where drafts are verified, nothing here depends on which tokens are sampled, so that the host knows every
    position before the device has computed it; only the token itself stays on the device. One more row is for padding:
    its block table points to the scratch block, whose contents are never read.

    A sequence has a row in the block table of every cache group. Entries behind a group's window stay as they were: any
    valid blocks.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_len: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        groups_by_kind: Sequence[int] = (1,),
        draft_rows: int = 0,
    ) -> None:
        """groups_by_kind: BlockKind.groups of each kind of layers. draft_rows: further rows, see `copy_rows`."""
        rows, width = max_running + 1 + draft_rows, -(-max_len // block_size)
        self.padding_row = max_running
        self.draft_rows = range(max_running + 1, rows)
        """Rows of no sequence, each for one token of a draft slice during a step."""
        self.block_size = block_size
        self.computed = np.zeros(rows, np.int64)
        """[rows]: tokens in the KV cache once all steps launched so far are done."""
        num_groups = sum(groups_by_kind) or 1  # nothing is read from the tables of a model without blocks
        self.group_host_tables = np.zeros((num_groups, rows, width), np.int32)
        """[groups, rows, max blocks]: the block tables of each sequence."""
        self.group_tables = torch.full((num_groups, rows, width), scratch_block, dtype=torch.int32, device=device)
        """The block tables on the device; beyond a sequence's blocks: any valid block."""
        self.host_tables, self.tables = self.group_host_tables[0], self.group_tables[0]
        """Block tables of the first group, on the host and on the device."""
        self._has_one_table = num_groups == 1
        self._groups_by_kind = tuple(groups_by_kind)
        self._first_groups = tuple(itertools.accumulate(groups_by_kind, initial=0))
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows]: the token sampled last, the input of the next decode."""
        self._flat_tables = self.group_tables.view(-1)
        self._sequences: dict[int, _RunningSequence] = {}
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._changed_entries: list[npt.NDArray[np.int64]] = []
        """Indices into the flattened block tables that the device does not have yet."""
        self._changed_blocks: list[Sequence[int]] = []
        """The blocks at these indices."""

    def sequences(self) -> tuple[int, ...]:
        """Numbers of the sequences in the batch, in the order in which they came."""
        return tuple(self._sequences)

    def update(self, step: Step) -> None:
        """Apply the step's differences: finished sequences, new sequences, positions after drafts, new blocks."""
        for sequence in step.finished:
            self._free_rows.append(self._sequences.pop(sequence).row)
        for new in step.new:
            row = self._free_rows.pop()
            self.computed[row] = 0
            self._sequences[new.sequence] = _RunningSequence(row, np.frombuffer(new.tokens.pack(), np.int32))
        for sequence, position in step.positions:
            self.computed[self._sequences[sequence].row] = position
        if step.blocks:
            if self._has_one_table:
                self._append(step.blocks)
            else:
                for table, blocks in step.blocks:
                    self._append_to_groups(table, blocks)

    def _append(self, additions: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Append blocks to the only block tables of sequences."""
        width = self.host_tables.shape[1]
        for sequence, added in additions:
            running, blocks = self._sequences[sequence], added
            if blocks[0] < 0:  # indices behind the window, or all that are left after rejected drafts
                running.num_blocks, blocks = -blocks[0], blocks[1:]
            first = running.row * width + running.num_blocks
            running.num_blocks += len(blocks)
            self.host_tables[running.row, running.num_blocks - len(blocks) : running.num_blocks] = blocks
            self._changed_entries.append(np.arange(first, first + len(blocks)))
            self._changed_blocks.append(blocks)

    def _append_to_groups(self, table: int, blocks: Sequence[int]) -> None:
        """Append blocks to a sequence's tables of one kind, each index of which has one block per group."""
        sequence, kind = divmod(table, len(self._groups_by_kind))
        running, groups = self._sequences[sequence], self._groups_by_kind[kind]
        running.lengths = running.lengths or [0] * len(self._groups_by_kind)
        begin = running.lengths[kind]
        if blocks[0] < 0:
            begin, blocks = -blocks[0], blocks[1:]
        running.lengths[kind] = end = begin + len(blocks) // groups
        _, rows, width = self.group_host_tables.shape
        for number in range(groups):
            group, own = self._first_groups[kind] + number, blocks[number::groups]
            self.group_host_tables[group, running.row, begin:end] = own
            first = (group * rows + running.row) * width + begin
            self._changed_entries.append(np.arange(first, first + len(own)))
            self._changed_blocks.append(own)

    def take_changes(self) -> list[npt.NDArray[Any]]:
        """The block table entries changed since the last call, to be sent to the device and passed to `apply`.

        Returns indices [entries] int64 into the flattened tables and blocks [entries] int32; an empty list when nothing
        has changed.
        """
        if not self._changed_entries:
            return []
        blocks = np.fromiter(itertools.chain.from_iterable(self._changed_blocks), np.int32)
        changes: list[npt.NDArray[Any]] = [np.concatenate(self._changed_entries), blocks]
        self._changed_entries.clear()
        self._changed_blocks.clear()
        return changes

    def apply(self, changes: Sequence[torch.Tensor]) -> None:
        """Update the block tables on the device. changes: the arrays of `take_changes`, on the device."""
        if changes:
            entries, blocks = changes
            self._flat_tables.index_copy_(0, entries, blocks)

    def copy_rows(self, targets: torch.Tensor, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        """Give draft rows the block tables of other rows, and their own last tokens; all [n] int64 on the device."""
        self.group_tables.index_copy_(1, targets, self.group_tables.index_select(1, sources))
        self.last_tokens.index_copy_(0, targets, tokens)

    def row(self, sequence: int) -> int:
        """The row of a sequence."""
        return self._sequences[sequence].row

    def rows(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """The rows of sequences: [len(sequences)]."""
        running = self._sequences
        return np.fromiter((running[sequence].row for sequence in sequences), np.int64, len(sequences))

    def block_tables(self, rows: npt.NDArray[np.int64], width: int, group: int = 0) -> npt.NDArray[np.int32]:
        """The first `width` entries of the block tables of these rows, in a cache group: [len(rows), width]."""
        tables: npt.NDArray[np.int32] = self.group_host_tables[group][rows, :width]
        return tables

    def capacities(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """Tokens that the blocks of sequences hold, by their tables of the first kind: [len(sequences)]."""
        running = (self._sequences[sequence] for sequence in sequences)
        blocks = (each.num_blocks if self._has_one_table else each.lengths[0] for each in running)
        return np.fromiter(blocks, np.int64, len(sequences)) * self.block_size

    def known(self, sequence: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `stop` of a sequence, of those known when it was added."""
        return self._sequences[sequence].tokens[start:stop].astype(np.int64)

    def set_last_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the tokens just sampled for these rows; both [n] int64 on the device."""
        self.last_tokens.index_copy_(0, rows, tokens)
