"""What the runner keeps of each sequence between steps: one row of several tables, on the host and on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.types import NewSequence, Step


@define
class _Resident:
    """A sequence the runner knows."""

    row: int
    tokens: npt.NDArray[np.int64]
    """[known tokens]: prompt, and output computed before a preemption."""
    blocks: int = 0
    """Entries of its row of the block table."""


class PersistentBatch:
    """The sequences that may be in a step, each in a row of its own while it runs.

    Nothing here depends on what is sampled, so that the host knows every position before the device has computed it;
    only the token itself stays on the device. One row more than there are sequences is for padding: its block table
    leads to the scratch block, and whatever is stored for it is never read.
    """

    def __init__(
        self, *, max_running: int, max_len: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        rows, width = max_running + 1, -(-max_len // block_size)
        self.padding_row = max_running
        self.block_size = block_size
        self.computed = np.zeros(rows, np.int64)
        """[rows]: tokens in the cache once all steps launched so far are done."""
        self.host_tables = np.zeros((rows, width), np.int32)
        """[rows, most blocks]: the blocks of each sequence."""
        self.tables = torch.full((rows, width), scratch_block, dtype=torch.int32, device=device)
        """The same on the device; beyond a sequence's blocks: any valid block."""
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows]: the token sampled last, which the next decode computes."""
        self._flat_tables = self.tables.view(-1)
        self._persistent_batch: dict[int, _Resident] = {}
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._places: list[npt.NDArray[np.int64]] = []
        self._blocks: list[Sequence[int]] = []

    def update(self, step: Step) -> None:
        """Take in the step's differences: sequences that ended, new ones, blocks."""
        for sequence in step.finished:
            self._free_rows.append(self._persistent_batch.pop(sequence).row)
        for new in step.new:
            row = self._free_rows.pop()
            self.computed[row] = 0
            self._persistent_batch[new.sequence] = _Resident(row, np.asarray(new.tokens, np.int64))
        width = self.host_tables.shape[1]
        for sequence, blocks in step.blocks:
            resident = self._persistent_batch[sequence]
            first = resident.row * width + resident.blocks
            resident.blocks += len(blocks)
            self.host_tables[resident.row, resident.blocks - len(blocks) : resident.blocks] = blocks
            self._places.append(np.arange(first, first + len(blocks)))
            self._blocks.append(blocks)

    def take_changes(self) -> list[npt.NDArray[Any]]:
        """What has changed in the tables since the last call, to be sent to the device and given to `apply`: places
        [entries] int64 in the flattened tables and blocks [entries] int32; empty when nothing has."""
        if not self._places:
            return []
        blocks = np.fromiter(itertools.chain.from_iterable(self._blocks), np.int32)
        changes: list[npt.NDArray[Any]] = [np.concatenate(self._places), blocks]
        self._places.clear()
        self._blocks.clear()
        return changes

    def apply(self, changes: Sequence[torch.Tensor]) -> None:
        """Bring the device's tables up to date; `changes`: those of `take_changes`, on the device."""
        if changes:
            places, blocks = changes
            self._flat_tables.index_copy_(0, places, blocks)

    def row(self, sequence: int) -> int:
        """The row of a sequence."""
        return self._persistent_batch[sequence].row

    def rows(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """The rows of sequences: [len(sequences)]."""
        persistent_batch = self._persistent_batch
        return np.fromiter((persistent_batch[sequence].row for sequence in sequences), np.int64, len(sequences))

    def known(self, sequence: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `stop` of those that came with the sequence."""
        return self._persistent_batch[sequence].tokens[start:stop]

    def prompt_targets(self, new: NewSequence, start: int, count: int) -> npt.NDArray[np.int64]:
        """The prompt tokens that follow positions `start` to `start + count`; the last prompt position has none."""
        stop = min(start + count, new.prompt_len - 1)
        return self.known(new.sequence, start + 1, stop + 1)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remember the tokens just sampled for these rows; both [n] int64 on the device."""
        self.last_tokens.index_copy_(0, rows, tokens)
