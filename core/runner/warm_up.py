"""Warm-up: runs once, before the server listens, the kernels of steps with prompts outside of CUDA graphs."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.models.base import Model
from engine.core.sampling.draft_rows import DraftRows
from engine.core.sampling.sampler import Sampler
from engine.core.types import DraftSlice

MAX_KERNEL_ROWS = 16
"""Up to this number of rows the LM head has kernels of its own, chosen by number of rows."""


@torch.inference_mode()
def warm_up_sampling(model: Model, sampler: Sampler, hidden: torch.Tensor) -> None:
    """Compute logits and sample from them, for every number of rows that may have kernels of its own.

    A step with prompts samples for as many sequences as complete their prompts in it, so any of these numbers can be
    the first that a server sees. hidden: [at least 1 row, hidden_size], zeros.
    """
    for rows in range(1, min(MAX_KERNEL_ROWS + 1, len(hidden)) + 1):
        logits = model.logits(hidden[:rows])
        padding = torch.full((rows,), sampler.table.padding_row, device=logits.device)
        for values in (logits, logits.float()):  # logits processors return float32
            sampler.greedy_path.choose(values, None)
            if sampler.draw_path.capturable:
                sampler.draw_path.draw_unprocessed(values, padding)


@torch.inference_mode()
def warm_up_verification(sampler: Sampler, logits: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """Verify drafts of the padding row. logits: [1, vocab]; last_tokens: [table rows] int64, of the persistent batch.

    One draft and several drafts have kernels of their own.
    """
    for drafts in (1, 2):
        part = DraftSlice(0, 0, (0,) * (1 + drafts))
        rows = DraftRows.of([part], np.array([sampler.table.padding_row]), 0, logits.device)
        table_rows = torch.full((1 + drafts,), sampler.table.padding_row, device=logits.device)
        for values in (logits, logits.float()):
            repeated = values.expand(1 + drafts, -1).contiguous()
            tokens, _ = sampler.greedy_path.choose(repeated, None)
            if sampler.draw_path.capturable:
                tokens, _ = sampler.draw_path.draw_unprocessed(repeated, table_rows, rows)
            sampler.verify(rows, tokens, last_tokens)
