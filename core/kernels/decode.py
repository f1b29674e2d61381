"""The two ends of a decode step that is replayed without the host: what to compute, and what came of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.core.kernels.launch import dependent_launch, release, wait


@triton.jit
def _begin(
    rows,
    positions,
    last_tokens,
    all_tables,
    tokens,
    slots,
    context_lens,
    tables,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    release(PDL)
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    position = tl.load(positions + sequence)
    source = all_tables + row * width
    target = tables + sequence.to(tl.int64) * width
    tl.store(tokens + sequence, tl.load(last_tokens + row))
    tl.store(context_lens + sequence, (position + 1).to(tl.int32))
    page = position // PAGE
    block = tl.load(source + page).to(tl.int64)
    tl.store(slots + sequence, block * PAGE + position % PAGE)
    for start in range(0, page + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at <= page
        tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)


def begin_decode(
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    all_tables: torch.Tensor,
    *,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    tables: torch.Tensor,
    page_size: int,
) -> None:
    """Fill a batch's tensors, those after the star, for sequences in these rows, each computing one token.

    rows, positions: [sequences] int64; last_tokens: [all rows] int64; all_tables: [all rows, width] int32.
    tokens, slots: [sequences] int64; context_lens: [sequences] int32; tables: [sequences, width] int32, of which only
    what the contexts need is written.
    """
    _begin[(len(rows),)](
        rows,
        positions,
        last_tokens,
        all_tables,
        tokens,
        slots,
        context_lens,
        tables,
        all_tables.shape[1],
        PAGE=page_size,
        BLOCK=128,
        **dependent_launch(rows.device),
    )


@triton.jit
def _end(
    rows,
    positions,
    last_tokens,
    tokens,
    peaks,
    checked,
    count,
    padding_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    release(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    token = tl.load(tokens + at, mask=inside, other=0)
    peak = tl.load(peaks + at, mask=inside, other=0.0)
    finite = tl.abs(peak) < float("inf")  # False for NaN
    tl.store(checked + at, tl.where(finite, token, -1), mask=inside)
    tl.store(last_tokens + row, token, mask=inside)
    tl.store(positions + at, tl.where(row == padding_row, position, position + 1), mask=inside)


def end_decode(
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    checked: torch.Tensor,
    padding_row: int,
) -> None:
    """Keep the tokens sampled, and go one position further.

    rows, positions, tokens: [sequences] int64; peaks: [sequences] float32, the greatest logits; last_tokens:
    [all rows] int64; checked: [sequences] int64, set to the token, or to -1 where the peak is not finite. The padding
    row stays where it is.
    """
    block = 128
    _end[(triton.cdiv(len(rows), block),)](
        rows,
        positions,
        last_tokens,
        tokens,
        peaks,
        checked,
        len(rows),
        padding_row,
        BLOCK=block,
        **dependent_launch(rows.device),
    )
