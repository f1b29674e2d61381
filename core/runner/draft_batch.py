"""The batch of a replayed decode step that verifies drafts: from the step to the rows that the replay reads."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.sampling.draft_rows import DraftRows, HostDraftRows
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.transfer import to_device
from engine.core.types import Step


def send_draft_batch(
    step: Step,
    persistent_batch: PersistentBatch,
    table: SamplingTable,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    fused: bool,
) -> tuple[DraftRows, torch.Tensor]:
    """Send the batch of a step with drafts, in one transfer, while the device is idle: first `step.decodes`, then a row
    for each token of each draft slice.

    rows, positions: [batch size of the graph] int64, filled here, with padding after the step's rows. A draft row gets
    the block tables and sampling parameters of its sequence, and the token. fused: by one Triton kernel instead of
    PyTorch's operations.
    Returns the rows of the drafts, and the row of the sequence of each draft row: [draft rows] int64.
    """
    plain, size = len(step.decodes), len(rows)
    owners = persistent_batch.rows([part.sequence for part in step.drafts])
    drafts = HostDraftRows.of(step.drafts, owners, plain)
    count = plain + len(drafts.tokens)
    host_rows, host_positions = np.full(size, persistent_batch.padding_row, np.int64), np.zeros(size, np.int64)
    if plain:
        decoding = persistent_batch.rows(step.decodes)
        host_rows[:plain], host_positions[:plain] = decoding, persistent_batch.computed[decoding]
        persistent_batch.computed[decoding] += 1
    host_rows[plain:count] = persistent_batch.draft_rows[: count - plain]
    starts = np.fromiter((part.start for part in step.drafts), np.int64, len(step.drafts))
    host_positions[plain:count] = np.repeat(starts, drafts.counts) + drafts.arrays[-1][plain:]
    sources = np.repeat(owners, drafts.counts)
    changes = persistent_batch.take_changes()
    given_rows, given_positions, device_sources, tokens, *others = to_device(
        [host_rows, host_positions, sources, drafts.tokens, *drafts.arrays, *changes], rows.device
    )
    draft_rows = drafts.on_device(others[: len(drafts.arrays)])
    persistent_batch.apply(others[len(drafts.arrays) :])
    if fused:
        from engine.ops.sampling.draft_step import fill_draft_rows

        fill_draft_rows(
            given_rows,
            given_positions,
            device_sources,
            tokens,
            draft_rows.offsets,
            rows=rows,
            positions=positions,
            all_tables=persistent_batch.group_tables,
            last_tokens=persistent_batch.last_tokens,
            words=table.words,
            numbers=table.numbers,
            block_size=persistent_batch.block_size,
        )
    else:
        rows.copy_(given_rows)
        positions.copy_(given_positions)
        targets = rows[plain:count]
        persistent_batch.copy_rows(targets, device_sources, tokens)
        table.copy_rows(targets, device_sources, draft_rows.offsets[plain:])
    return draft_rows, device_sources


def warm_up_draft_batch(
    persistent_batch: PersistentBatch, table: SamplingTable, *, rows: torch.Tensor, positions: torch.Tensor
) -> None:
    """Compile the kernel of `send_draft_batch` with fused=True, with a draft row that stands for padding.

    rows, positions: [1 or more] int64, whose first element is set.
    """
    from engine.ops.sampling.draft_step import fill_draft_rows

    zero = torch.zeros(1, dtype=torch.int64, device=rows.device)
    padding = torch.full_like(zero, persistent_batch.padding_row)
    fill_draft_rows(
        torch.full_like(zero, persistent_batch.draft_rows[0]),
        zero,
        padding,
        zero,
        zero,
        rows=rows,
        positions=positions,
        all_tables=persistent_batch.group_tables,
        last_tokens=persistent_batch.last_tokens,
        words=table.words,
        numbers=table.numbers,
        block_size=persistent_batch.block_size,
    )
    rows[:1].copy_(padding)
