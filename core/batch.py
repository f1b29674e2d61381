"""The batch as the model sees it, and how a Step becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.residents import Residents
from engine.core.transfer import to_device
from engine.core.types import Step

if TYPE_CHECKING:
    from engine.core.attention import AttentionBackend, Plan
    from engine.core.kv_cache import KVPool


@define(kw_only=True)
class ForwardBatch:
    """One forward pass over ragged sequences, laid end to end; those that decode (one token each) stand first.

    Device tensors have their host copies beside them, so that a backend can plan without waiting for the device.

    In a batch for a CUDA graph all sequences decode, the tensors are the graph's own, and their contents change from
    one replay to the next: only shapes may be relied on. The host copies then hold the most that can come: contexts of
    the longest length.
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


def build_batch(residents: Residents, step: Step) -> tuple[ForwardBatch, torch.Tensor]:
    """The batch of one iteration of a step that `residents` knows of, and the rows of the sequences that sample:
    [sampling] int64 on the device. Its tokens then count as computed.

    One copy takes everything to the device; the tokens to decode are there already.
    """
    decodes = len(step.decodes)
    rows = residents.rows([*step.decodes, *(piece.sequence for piece in step.chunks)])
    starts, counts = residents.computed[rows], np.ones(len(rows), np.int64)
    starts[decodes:] = [piece.start for piece in step.chunks]
    counts[decodes:] = [piece.count for piece in step.chunks]
    ends = starts + counts
    residents.computed[rows] = ends
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])

    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)
    size = residents.page_size
    width = -(-int(ends.max()) // size)
    tables = residents.host_tables[rows, :width]
    slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
    known = [residents.known(piece.sequence, piece.start, piece.start + piece.count) for piece in step.chunks]
    sampling = np.ones(len(rows), bool)
    sampling[decodes:] = [piece.sample for piece in step.chunks]

    arrays: list[npt.NDArray[Any]] = [
        rows,
        rows[sampling],
        np.concatenate(known) if known else np.zeros(0, np.int64),
        positions,
        slots,
        query_starts[1:][sampling] - 1,
        query_starts.astype(np.int32),
        ends.astype(np.int32),
        *residents.take_changes(),
    ]
    device = residents.tables.device
    rows_there, sampling_rows, prompts, places, slots_there, logit_rows, bounds, contexts, *changes = to_device(
        arrays, device
    )
    residents.apply(changes)
    tokens = prompts
    if decodes:
        decoded = residents.last_tokens[rows_there[:decodes]]
        tokens = torch.cat((decoded, prompts)) if known else decoded
    batch = ForwardBatch(
        tokens=tokens,
        positions=places,
        slots=slots_there,
        query_starts=bounds,
        context_lens=contexts,
        block_tables=residents.tables[rows_there, :width],
        logit_rows=logit_rows,
        num_decodes=decodes,
        query_lens_host=counts.astype(np.int32),
        context_lens_host=ends.astype(np.int32),
        block_tables_host=tables,
    )
    return batch, sampling_rows
