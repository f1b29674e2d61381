"""Builds the ForwardBatch of one iteration of a Step: decodes, prefill chunks, draft slices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.attention.batch import ForwardBatch
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.transfer import to_device
from engine.core.types import Step


def build_batch(
    persistent_batch: PersistentBatch, step: Step, num_groups: int = 1
) -> tuple[ForwardBatch, torch.Tensor]:
    """Build the batch of one iteration of a step that `persistent_batch` was updated with; its tokens then count as
    computed.

    Returns the batch and the rows of the sequences that sample: [sampling] int64 on the device; the row of a sequence
    with drafts is repeated for each token of its slice. Everything goes to the device in one copy, except the tokens to
    decode, which are there already. num_groups: cache groups, of which those with states come last and have no block
    tables.
    """
    num_decodes, num_others = len(step.decodes), len(step.decodes) + len(step.chunks)
    sequences = [*step.decodes, *(chunk.sequence for chunk in step.chunks), *(part.sequence for part in step.drafts)]
    rows = persistent_batch.rows(sequences)
    starts, counts = persistent_batch.computed[rows], np.ones(len(rows), np.int64)
    starts[num_decodes:] = [*(chunk.start for chunk in step.chunks), *(part.start for part in step.drafts)]
    counts[num_decodes:num_others] = [chunk.count for chunk in step.chunks]
    counts[num_others:] = [len(part.tokens) for part in step.drafts]
    ends = starts + counts
    persistent_batch.computed[rows] = ends
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])

    token_rows = np.repeat(rows, counts)
    positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)
    size = persistent_batch.block_size
    width = -(-int(ends.max()) // size)
    slots = persistent_batch.host_tables[token_rows, positions // size].astype(np.int64) * size + positions % size
    known = _known_tokens(persistent_batch, step)
    sampling_rows, logit_tokens = _find_sampling(step, rows, counts, query_starts)

    arrays: list[npt.NDArray[Any]] = [
        rows,
        sampling_rows,
        known,
        positions,
        slots,
        logit_tokens,
        query_starts.astype(np.int32),
        ends.astype(np.int32),
        *persistent_batch.take_changes(),
    ]
    if num_groups > 1:
        tables = persistent_batch.group_host_tables
        arrays.append(tables[:, token_rows, positions // size].astype(np.int64) * size + positions % size)
    (
        device_rows,
        device_sampling_rows,
        known_tokens,
        device_positions,
        device_slots,
        logit_rows,
        device_query_starts,
        context_lens,
        *changes,
    ) = to_device(arrays, persistent_batch.tables.device)
    device_group_slots = changes.pop() if num_groups > 1 else None
    persistent_batch.apply(changes)
    tokens = known_tokens
    if num_decodes:
        decoded = persistent_batch.last_tokens[device_rows[:num_decodes]]
        tokens = torch.cat((decoded, known_tokens)) if len(known) else decoded
    batch = ForwardBatch(
        tokens=tokens,
        positions=device_positions,
        slots=device_slots,
        query_starts=device_query_starts,
        context_lens=context_lens,
        block_tables=persistent_batch.tables[device_rows, :width],
        logit_rows=logit_rows,
        num_decodes=num_decodes,
        query_lens_host=counts.astype(np.int32),
        context_lens_host=ends.astype(np.int32),
        block_tables_host=partial(persistent_batch.block_tables, rows, width),
        state_rows=device_rows,
    )
    if device_group_slots is not None:
        batch.groups = tuple(
            group_batch(
                batch,
                slots=device_group_slots[table],
                block_tables=persistent_batch.group_tables[table, device_rows, :width],
                block_tables_host=partial(persistent_batch.block_tables, rows, width, table),
            )
            for table in (min(number, len(persistent_batch.group_tables) - 1) for number in range(num_groups))
        )
    return batch, device_sampling_rows


def _known_tokens(persistent_batch: PersistentBatch, step: Step) -> npt.NDArray[np.int64]:
    """The tokens of prefill chunks and draft slices, which the host knows."""
    known = [persistent_batch.known(chunk.sequence, chunk.start, chunk.start + chunk.count) for chunk in step.chunks]
    known += [np.array(part.tokens, np.int64) for part in step.drafts]
    return np.concatenate(known) if known else np.zeros(0, np.int64)


def _find_sampling(
    step: Step, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], query_starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where a step samples: after each decode, each chunk that ends a prefill, and each token of a draft slice.

    rows, counts: row and number of tokens of each sequence. query_starts: index of its first token in the batch.
    Returns the row and the index of the token of each sample.
    """
    num_decodes, num_others = len(step.decodes), len(step.decodes) + len(step.chunks)
    sampling = np.ones(num_others, bool)
    sampling[num_decodes:] = [chunk.sample for chunk in step.chunks]
    sampling_rows, logit_tokens = rows[:num_others][sampling], query_starts[1 : num_others + 1][sampling] - 1
    if step.drafts:
        sampling_rows = np.concatenate((sampling_rows, np.repeat(rows[num_others:], counts[num_others:])))
        logit_tokens = np.concatenate((logit_tokens, np.arange(query_starts[num_others], query_starts[-1])))
    return sampling_rows, logit_tokens


def group_batch(
    batch: ForwardBatch,
    *,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    block_tables_host: npt.NDArray[np.int32] | Callable[[], npt.NDArray[np.int32]],
) -> ForwardBatch:
    """The batch as one of several cache groups sees it."""
    return ForwardBatch(
        tokens=batch.tokens,
        positions=batch.positions,
        slots=slots,
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        block_tables=block_tables,
        logit_rows=batch.logit_rows,
        num_decodes=batch.num_decodes,
        query_lens_host=batch.query_lens_host,
        context_lens_host=batch.context_lens_host,
        block_tables_host=block_tables_host,
        state_rows=batch.state_rows,
        rows_share_sequences=batch.rows_share_sequences,
    )
