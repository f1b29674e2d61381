"""Turns one iteration of a Step into the ForwardBatch that the model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.attention.batch import ForwardBatch
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.runner.transfer import to_device
from engine.core.types import Step


def build_batch(persistent_batch: PersistentBatch, step: Step) -> tuple[ForwardBatch, torch.Tensor]:
    """The batch of one iteration of a step that `persistent_batch` knows of, and the rows of the sequences that sample:
    [sampling] int64 on the device. Its tokens then count as computed.

    One copy takes everything to the device; the tokens to decode are there already.
    """
    decodes = len(step.decodes)
    rows = persistent_batch.rows([*step.decodes, *(piece.sequence for piece in step.chunks)])
    starts, counts = persistent_batch.computed[rows], np.ones(len(rows), np.int64)
    starts[decodes:] = [piece.start for piece in step.chunks]
    counts[decodes:] = [piece.count for piece in step.chunks]
    ends = starts + counts
    persistent_batch.computed[rows] = ends
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])

    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)
    size = persistent_batch.block_size
    width = -(-int(ends.max()) // size)
    tables = persistent_batch.host_tables[rows, :width]
    slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
    known = [persistent_batch.known(piece.sequence, piece.start, piece.start + piece.count) for piece in step.chunks]
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
        *persistent_batch.take_changes(),
    ]
    device = persistent_batch.tables.device
    rows_there, sampling_rows, prompts, places, slots_there, logit_rows, bounds, contexts, *changes = to_device(
        arrays, device
    )
    persistent_batch.apply(changes)
    tokens = prompts
    if decodes:
        decoded = persistent_batch.last_tokens[rows_there[:decodes]]
        tokens = torch.cat((decoded, prompts)) if known else decoded
    batch = ForwardBatch(
        tokens=tokens,
        positions=places,
        slots=slots_there,
        query_starts=bounds,
        context_lens=contexts,
        block_tables=persistent_batch.tables[rows_there, :width],
        logit_rows=logit_rows,
        num_decodes=decodes,
        query_lens_host=counts.astype(np.int32),
        context_lens_host=ends.astype(np.int32),
        block_tables_host=tables,
    )
    return batch, sampling_rows
