"""The two ends of a decode step that is replayed without the host: what to compute, and what came of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait


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
    wait(PDL)  # the next one is released at the end, see kernels.launch
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
    block_size: int,
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
        PAGE=block_size,
        BLOCK=128,
        **dependent_launch(rows.device),
    )


@triton.jit
def _end(
    rows,
    positions,
    last_tokens,
    outputs,
    tokens,
    peaks,
    turn,
    host_tokens,
    host_peaks,
    count,
    most,
    turns,
    padding_row,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    release(PDL)
    number = tl.load(turn)
    line = (number % turns) * most
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        row = tl.load(rows + at, mask=inside, other=0)
        real = inside & (row != padding_row)
        position = tl.load(positions + at, mask=real, other=0)
        token = tl.load(tokens + at, mask=inside, other=0)
        tl.store(host_tokens + line + at, token, mask=inside)
        tl.store(host_peaks + line + at, tl.load(peaks + at, mask=inside, other=0.0), mask=inside)
        tl.store(last_tokens + row, token, mask=real)
        tl.store(positions + at, position + 1, mask=real)
        if ADVANCE:
            tl.store(outputs + row, tl.load(outputs + row, mask=real, other=0) + 1, mask=real)
    tl.store(turn, number + 1)


def end_decode(
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    outputs: torch.Tensor,
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    *,
    turn: torch.Tensor,
    host_tokens: torch.Tensor,
    host_peaks: torch.Tensor,
    padding_row: int,
    advance: bool,
) -> None:
    """Keep the tokens sampled, go one position further, and tell the host.

    rows, positions, tokens: [sequences] int64; peaks: [sequences] float32, the greatest logits; last_tokens, outputs:
    [all rows] int64, the latter counted up with `advance`; turn: [1] int64, how often this was done before; host_tokens
    (int64) and host_peaks (float32): [turns, at least sequences] in pinned memory, written one line a turn, from the
    first again after the last. Rows of padding stay where they are.
    """
    _end[(1,)](
        rows,
        positions,
        last_tokens,
        outputs,
        tokens,
        peaks,
        turn,
        host_tokens,
        host_peaks,
        len(rows),
        host_tokens.shape[1],
        host_tokens.shape[0],
        padding_row,
        ADVANCE=advance,
        BLOCK=256,
        **dependent_launch(rows.device),
    )
