"""The batch as the model sees it, and how a Step becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.types import NewSequence, Step

if TYPE_CHECKING:
    from engine.core.attention import AttentionBackend, Plan
    from engine.core.kv_cache import KVPool


@define(kw_only=True)
class ForwardBatch:
    """One forward pass over ragged sequences, laid end to end; those that decode (one token each) stand first.

    Device tensors have their host copies beside them, so that a backend can plan without waiting for the device.
    """

    tokens: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64: each token's place in its sequence."""
    slots: torch.Tensor
    """[tokens] int64: where its key and value go: block * page_size + offset."""
    query_starts: torch.Tensor
    """[sequences + 1] int32: first token of each sequence, then the number of tokens."""
    context_lens: torch.Tensor
    """[sequences] int32: tokens in the cache after this pass, the new ones included."""
    block_tables: torch.Tensor
    """[sequences, most blocks] int32; beyond a sequence's blocks: any valid block."""
    logit_rows: torch.Tensor
    """[rows] int64: the tokens whose logits are wanted."""
    num_decodes: int
    query_lens_host: npt.NDArray[np.int32]
    """[sequences] int32."""
    context_lens_host: npt.NDArray[np.int32]
    """[sequences] int32."""
    block_tables_host: npt.NDArray[np.int32]
    """[sequences, most blocks] int32."""

    @property
    def num_sequences(self) -> int:
        """How many sequences."""
        return len(self.query_lens_host)


@define(kw_only=True)
class ForwardPass:
    """All that a model's layers need for one pass, handed down as an argument."""

    batch: ForwardBatch
    attention: AttentionBackend
    plan: Plan
    pool: KVPool


@define
class _Resident:
    """A sequence the runner knows."""

    row: int
    """Its row in the persistent tables."""
    tokens: npt.NDArray[np.int64]
    """[known tokens] int64: prompt, and output computed before a preemption."""
    blocks: int = 0
    """Entries of its row of the block table."""


class BatchBuilder:
    """Keeps what a step needs of each sequence between steps, and turns a Step into a ForwardBatch.

    The only place where host data becomes device data. The last sampled token of each sequence stays on the device.
    """

    def __init__(self, *, max_running: int, max_len: int, page_size: int, device: str) -> None:
        self._device = device
        self._page_size = page_size
        self._sequences: dict[int, _Resident] = {}
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._tables = np.zeros((max_running, -(-max_len // page_size)), np.int32)
        self._last_tokens = torch.zeros(max_running, dtype=torch.int64, device=device)

    def update(self, step: Step) -> None:
        """Take in the step's differences: sequences that ended, new ones, blocks."""
        for sequence in step.finished:
            self._free_rows.append(self._sequences.pop(sequence).row)
        for new in step.new:
            self._sequences[new.sequence] = _Resident(self._free_rows.pop(), np.asarray(new.tokens, np.int64))
        for sequence, blocks in step.blocks:
            resident = self._sequences[sequence]
            self._tables[resident.row, resident.blocks : resident.blocks + len(blocks)] = blocks
            resident.blocks += len(blocks)

    def build(self, step: Step, iteration: int = 0) -> ForwardBatch:
        """The batch of one of the step's iterations; `update` comes first."""
        residents = [self._sequences[piece.sequence] for piece in step.slices]
        rows = np.fromiter((resident.row for resident in residents), np.int64, len(residents))
        starts = np.fromiter((piece.start for piece in step.slices), np.int64, len(residents)) + iteration
        counts = np.fromiter((piece.count for piece in step.slices), np.int64, len(residents))
        query_starts = np.zeros(len(residents) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        ends = starts + counts

        decodes = step.num_decodes
        positions, owners = starts, np.arange(len(residents))
        if decodes < len(residents):
            owners = np.repeat(owners, counts)
            positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)
        tables = self._tables[rows, : -(-int(ends.max()) // self._page_size)]
        slots = tables[owners, positions // self._page_size].astype(np.int64)
        slots = slots * self._page_size + positions % self._page_size

        known = [
            resident.tokens[piece.start : piece.start + piece.count]
            for resident, piece in zip(residents[decodes:], step.slices[decodes:], strict=True)
        ]
        pieces = [self._last_tokens[self._tensor(rows[:decodes])]] if decodes else []
        if known:
            pieces.append(self._tensor(np.concatenate(known)))
        sampling = np.fromiter((piece.sample for piece in step.slices), bool, len(residents))
        return ForwardBatch(
            tokens=pieces[0] if len(pieces) == 1 else torch.cat(pieces),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            query_starts=self._tensor(query_starts.astype(np.int32)),
            context_lens=self._tensor(ends.astype(np.int32)),
            block_tables=self._tensor(tables),
            logit_rows=self._tensor(query_starts[1:][sampling] - 1),
            num_decodes=decodes,
            query_lens_host=counts.astype(np.int32),
            context_lens_host=ends.astype(np.int32),
            block_tables_host=tables,
        )

    def row(self, sequence: int) -> int:
        """Its row in tables of the running sequences, from 0 to max_running - 1."""
        return self._sequences[sequence].row

    def rows(self, sequences: list[int]) -> torch.Tensor:
        """The rows of these sequences, [len(sequences)] int64 on the device."""
        return self._tensor(np.fromiter(map(self.row, sequences), np.int64, len(sequences)))

    def keep(self, sequences: list[int], tokens: torch.Tensor) -> None:
        """Remember the tokens just sampled, [len(sequences)] on the device, for the next decode."""
        self._last_tokens[self.rows(sequences)] = tokens

    def prompt_targets(self, new: NewSequence, start: int, count: int) -> torch.Tensor:
        """The prompt tokens that follow positions start to start + count, [at most count] int64 on the device; the last
        prompt position has none."""
        stop = min(start + count, new.prompt_len - 1)
        return self._tensor(self._sequences[new.sequence].tokens[start + 1 : stop + 1])

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
