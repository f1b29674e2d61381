"""The tensors that CUDA graphs of decode steps read and write, and what a graph does at both ends of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.core.attention.batch import ForwardBatch
from engine.core.runner.build_batch import group_batch
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.schedulers.policy import MAX_DECODE_STEPS

if TYPE_CHECKING:
    from engine.core.sampling.base import CapturedTokens

HOST_LINES = 2 * MAX_DECODE_STEPS
"""Replays whose tokens fit in the pinned host buffer: the maximum of two steps in flight."""


class DecodeBatch:
    """The batch of replayed decode steps: a row per sequence, in tensors that keep their addresses.

    The host fills `rows` and `positions`. A step begins by filling the other tensors from the persistent batch
    (`begin`), and ends by storing its tokens and advancing the positions (`end`, or `advance` where tokens come later).
    """

    def __init__(
        self,
        persistent_batch: PersistentBatch,
        table: SamplingTable,
        *,
        num_groups: int,
        max_running: int,
        max_len: int,
        fused: bool,
        windows: Sequence[int | None],
        has_drafts: bool = False,
    ) -> None:
        """num_groups: of all cache groups. fused: begin and end a step by one Triton kernel each instead of PyTorch's
        operations. windows: of each cache group with blocks. has_drafts: whether drafts may be rows of a step."""
        self._has_drafts = has_drafts
        self._persistent_batch = persistent_batch
        self._sampling_table = table
        self._num_groups = num_groups
        self._max_len = max_len
        self._fused = fused
        device = persistent_batch.tables.device
        self._device = device

        def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_running, *shape, dtype=dtype, device=device)

        self.rows, self.positions = tensor(torch.int64), tensor(torch.int64)
        """Rows of the persistent batch, and the position that each computes next."""
        self.tokens = tensor(torch.int64)
        """The tokens that the rows compute."""
        self._sampled, self._max_logits = tensor(torch.int64), tensor(torch.float32)
        self._context_lens = tensor(torch.int32)
        tables = persistent_batch.group_tables
        self._slots = [tensor(torch.int64) for _ in tables]
        """Per cache group with blocks: the slot of each row's token."""
        self._tables = [tensor(torch.int32, tables.shape[2]) for _ in tables]
        """Per cache group with blocks: the block table of each row."""
        self._windows = list(windows) or [None]
        self._query_starts = torch.arange(max_running + 1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max_running, device=device)
        self.rows.fill_(persistent_batch.padding_row)
        pinned = device.type == "cuda"
        self._host_tokens = torch.zeros(HOST_LINES, max_running, dtype=torch.int64, pin_memory=pinned)
        self._host_max_logits = torch.zeros(HOST_LINES, max_running, dtype=torch.float32, pin_memory=pinned)
        self._num_replays = torch.zeros(1, dtype=torch.int64, device=device)
        """Replays that have written a line of the host buffer, counted on the device."""
        self._num_replays_launched = 0
        """Replays launched, counted on the host, which runs ahead of the device."""

    def pad(self, size: int) -> None:
        """Fill a batch with padding rows."""
        self.rows[:size].fill_(self._persistent_batch.padding_row)
        self.positions[:size].zero_()

    def forward_batch(self, size: int) -> ForwardBatch:
        """The batch that the graphs of a size read. Each replay fills its tensors, then advances its positions."""
        batch = ForwardBatch(
            tokens=self.tokens[:size],
            positions=self.positions[:size],
            slots=self._slots[0][:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[0][:size],
            logit_rows=self._all_rows[:size],
            num_decodes=size,
            query_lens_host=np.ones(size, np.int32),
            context_lens_host=np.full(size, self._max_len, np.int32),
            block_tables_host=np.zeros((size, self._tables[0].shape[1]), np.int32),
            state_rows=self.rows[:size],
            rows_share_sequences=self._has_drafts,
        )
        if self._num_groups > 1:
            batch.groups = tuple(
                group_batch(
                    batch,
                    slots=self._slots[table][:size],
                    block_tables=self._tables[table][:size],
                    block_tables_host=batch.block_tables_host,
                )
                for table in (min(number, len(self._tables) - 1) for number in range(self._num_groups))
            )
        return batch

    def begin(self, batch: ForwardBatch, size: int) -> None:
        """Fill the tensors of a batch (of `forward_batch`) from the persistent batch."""
        persistent_batch, rows = self._persistent_batch, self.rows[:size]
        if self._fused:
            from engine.ops.sampling.decode_step import begin_decode

            for group, window in enumerate(self._windows):
                begin_decode(
                    rows,
                    batch.positions,
                    persistent_batch.last_tokens,
                    persistent_batch.group_tables[group],
                    tokens=batch.tokens,
                    slots=self._slots[group][:size],
                    context_lens=batch.context_lens,
                    tables=self._tables[group][:size],
                    block_size=persistent_batch.block_size,
                    window=window,
                )
            return
        blocks, offsets = batch.positions // persistent_batch.block_size, batch.positions % persistent_batch.block_size
        for group in range(len(self._windows)):
            tables = self._tables[group][:size]
            tables.copy_(persistent_batch.group_tables[group, rows])
            slots = tables.gather(1, blocks[:, None]).squeeze(1) * persistent_batch.block_size + offsets
            self._slots[group][:size].copy_(slots)
        batch.tokens.copy_(persistent_batch.last_tokens[rows])
        batch.context_lens.copy_(batch.positions + 1)

    def end(self, size: int, captured: CapturedTokens) -> None:
        """Store the tokens for the next step and for the host, and advance the positions."""
        persistent_batch, table = self._persistent_batch, self._sampling_table
        rows, positions = self.rows[:size], self.positions[:size]
        if self._fused:
            from engine.ops.sampling.decode_step import end_decode

            end_decode(
                rows,
                positions,
                persistent_batch.last_tokens,
                table.num_outputs,
                captured.tokens,
                captured.max_logits,
                num_replays=self._num_replays,
                host_tokens=self._host_tokens,
                host_max_logits=self._host_max_logits,
                padding_row=persistent_batch.padding_row,
                advance=not captured.table_advanced,
            )
            return
        self._sampled[:size].copy_(captured.tokens)
        self._max_logits[:size].copy_(captured.max_logits)
        persistent_batch.set_last_tokens(rows, captured.tokens)
        self.advance(size)
        if not captured.table_advanced:
            table.advance(rows)

    def advance(self, size: int) -> None:
        """Advance the positions of the rows that are not padding."""
        self.positions[:size].add_(self.rows[:size] != self._persistent_batch.padding_row)

    def tokens_of_replay(self, count: int) -> SampledTokens:
        """The tokens that the replay just launched samples, on their way to the host."""
        if not self._fused:
            return SampledTokens.from_tokens(self._sampled[:count], self._max_logits[:count])
        line = self._num_replays_launched % HOST_LINES
        self._num_replays_launched += 1
        tokens, max_logits = self._host_tokens[line, :count], self._host_max_logits[line, :count]
        return SampledTokens.from_host(tokens, max_logits, self._device)

    def undo_count(self) -> None:
        """Reset the device's replay counter to the host's, after `end` ran outside a replay."""
        self._num_replays.fill_(self._num_replays_launched)
