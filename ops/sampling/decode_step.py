"""The first and last kernel of a replayed decode step: fill the batch's tensors, and store the sampled tokens."""

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
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)  # the next kernel is released when this one ends; see ops/common/launch.py
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    position = tl.load(positions + sequence)
    source = all_tables + row * width
    target = tables + sequence.to(tl.int64) * width
    tl.store(tokens + sequence, tl.load(last_tokens + row))
    tl.store(context_lens + sequence, (position + 1).to(tl.int32))
    last = position // BLOCK_SIZE
    block = tl.load(source + last).to(tl.int64)
    tl.store(slots + sequence, block * BLOCK_SIZE + position % BLOCK_SIZE)
    first = 0
    if WINDOW:
        first = tl.maximum(position + 1 - WINDOW, 0) // BLOCK_SIZE // COLUMNS * COLUMNS
    for start in range(first, last + 1, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at <= last
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
    window: int | None = None,
) -> None:
    """Fill a batch's tensors, the keyword arguments, for a decode of one token per sequence.

    rows, positions: [sequences] int64; last_tokens: [all rows] int64; all_tables: [all rows, width] int32, the block
    tables. tokens, slots: [sequences] int64; context_lens: [sequences] int32; tables: [sequences, width] int32, of
    which only the blocks that the contexts fill are written, or, with a window, its blocks.
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
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        COLUMNS=128,
        **dependent_launch(rows.device),
    )


@triton.jit
def _end(
    rows,
    positions,
    last_tokens,
    num_outputs,
    tokens,
    max_logits,
    num_replays,
    host_tokens,
    host_max_logits,
    count,
    line_size,
    num_lines,
    padding_row,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    release(PDL)
    number = tl.load(num_replays)
    line = (number % num_lines) * line_size
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        row = tl.load(rows + at, mask=inside, other=0)
        real = inside & (row != padding_row)
        position = tl.load(positions + at, mask=real, other=0)
        token = tl.load(tokens + at, mask=inside, other=0)
        tl.store(host_tokens + line + at, token, mask=inside)
        tl.store(host_max_logits + line + at, tl.load(max_logits + at, mask=inside, other=0.0), mask=inside)
        tl.store(last_tokens + row, token, mask=real)
        tl.store(positions + at, position + 1, mask=real)
        if ADVANCE:
            tl.store(num_outputs + row, tl.load(num_outputs + row, mask=real, other=0) + 1, mask=real)
    tl.store(num_replays, number + 1)


def end_decode(
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    num_outputs: torch.Tensor,
    tokens: torch.Tensor,
    max_logits: torch.Tensor,
    *,
    num_replays: torch.Tensor,
    host_tokens: torch.Tensor,
    host_max_logits: torch.Tensor,
    padding_row: int,
    advance: bool,
) -> None:
    """Store the sampled tokens, advance the positions, and write the tokens to host memory.

    rows, positions, tokens: [sequences] int64; max_logits: [sequences] float32; last_tokens, num_outputs: [all rows]
    int64; advance: whether to add 1 to num_outputs. num_replays: [1] int64, the number of calls before, increased by 1.
    host_tokens (int64) and host_max_logits (float32): [lines, at least sequences] in pinned memory; each call writes
    the next line, in turn. Padding rows do not advance.
    """
    _end[(1,)](
        rows,
        positions,
        last_tokens,
        num_outputs,
        tokens,
        max_logits,
        num_replays,
        host_tokens,
        host_max_logits,
        len(rows),
        host_tokens.shape[1],
        host_tokens.shape[0],
        padding_row,
        ADVANCE=advance,
        BLOCK=256,
        **dependent_launch(rows.device),
    )
