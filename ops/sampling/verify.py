"""Verifies drafts on a GPU, by the rule of `core/sampling/verify.py`, and advances the sequences.

A slice is a sequence's last token and the drafts after it. One program per slice compares the drafts with the tokens
sampled in their places, and advances the sequence's state on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_and_advance(at, row, count, token, counts, tokens, last_tokens, num_outputs):
    """Store a slice's results, and advance its sequence by the accepted drafts and the token after them."""
    tl.store(counts + at, count)
    tl.store(tokens + at, token)
    tl.store(last_tokens + row, token)
    tl.store(num_outputs + row, tl.load(num_outputs + row) + count + 1)


@triton.jit(do_not_specialize=["k"])
def _match_kernel(drafts, k, sampled, first, rows, counts, tokens, last_tokens, num_outputs):
    at = tl.program_id(0)
    start = tl.load(first + at)
    count = tl.zeros([], tl.int64)
    token = tl.load(sampled + start)
    for place in range(k):
        draft = tl.load(drafts + at * k + place)
        # Before the first mismatch, `token` is the one sampled in the place of this draft.
        matches = (count == place) & (draft == token)
        count += matches.to(tl.int64)
        token = tl.load(sampled + start + count)
    _store_and_advance(at, tl.load(rows + at), count, token, counts, tokens, last_tokens, num_outputs)


def match_rows(
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    *,
    last_tokens: torch.Tensor,
    num_outputs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first drafts of each slice that are the tokens sampled in their places; advance the sequences.

    drafts: [slices, k] int64, -1 where a slice has fewer; sampled: [n] int64, the tokens sampled from the rows of the
    logits; first: [slices] int64, each slice's first row; rows: [slices] int64, no sequence twice: each sequence's
    place in last_tokens and num_outputs, [all rows] int64, which are advanced.

    Returns (number of accepted drafts, the token after them), both [slices] int64.
    """
    slices, k = drafts.shape
    # A tensor each: that they are aligned must not depend on their number, or there would be two kernels.
    counts, tokens = (torch.empty(slices, dtype=torch.int64, device=drafts.device) for _ in range(2))
    if slices:
        _match_kernel[(slices,)](
            drafts.contiguous(), k, sampled, first, rows, counts, tokens, last_tokens, num_outputs, num_warps=1
        )
    return counts, tokens
