"""Argmax over the rows of a matrix, in two stages; a NaN in a row becomes the row's maximum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

CHUNK = 4096
"""Columns per program of the first stage."""
BLOCK = 1024
"""Partial results per iteration of the second stage."""
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def max_and_index(values, index, AXIS: tl.constexpr):
    """The maximum along an axis (NaN if any value is NaN) and its lowest index (where NaN counts as -inf).

    values: float32, -inf outside the row; index: int32, broadcasts to values, higher outside the row than inside.
    """
    has_nan = tl.max((values != values).to(tl.int32), axis=AXIS)
    clean = tl.where(values != values, float("-inf"), values)
    maximum = tl.max(clean, axis=AXIS)
    first = tl.min(tl.where(clean == tl.expand_dims(maximum, AXIS), index, NOWHERE), axis=AXIS)
    return tl.where(has_nan > 0, float("nan"), maximum), first


@triton.jit
def _partial_kernel(max_logits, tokens, logits, columns, CHUNK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    values = tl.load(logits + row * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    max_logit, first = max_and_index(values, column, 0)
    offset = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(max_logits + offset, max_logit)
    tl.store(tokens + offset, first)


@triton.jit(do_not_specialize=["count"])
def _reduce_kernel(
    max_logits, tokens, partial_max_logits, partial_tokens, count, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.full([BLOCK], 2147483647, tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    wait(PDL)
    for start in range(0, count, BLOCK):
        offset = start + lane
        value = tl.load(partial_max_logits + row * count + offset, mask=offset < count, other=float("-inf"))
        token = tl.load(partial_tokens + row * count + offset, mask=offset < count, other=2147483647)
        has_nan = has_nan | (value != value).to(tl.int32)
        value = tl.where(value != value, float("-inf"), value)
        better = (value > best) | ((value == best) & (token < first))
        best = tl.where(better, value, best)
        first = tl.where(better, token, first)
    max_logit, token = max_and_index(tl.where(has_nan > 0, float("nan"), best), first, 0)
    tl.store(max_logits + row, max_logit)
    tl.store(tokens + row, token.to(tl.int64))


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The max logit of each row, [rows] float32, and its column, [rows] int64: the first of equals.

    logits: [rows, columns]. With a NaN in a row the max logit is NaN, and the column any column.
    """
    rows, columns = logits.shape
    if not logits.is_contiguous():
        logits = logits.contiguous()
    chunks = -(-columns // CHUNK)
    max_logits = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    if rows:
        _partial_kernel[(rows, chunks)](
            max_logits, tokens, logits, columns, CHUNK=CHUNK, num_warps=4, **dependent_launch(logits.device)
        )
    return reduce_max(max_logits, tokens)


def reduce_max(partial_max_logits: torch.Tensor, partial_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second stage of `argmax_rows`: reduce partial results, [rows, count] float32 and int32, dense."""
    rows, count = partial_max_logits.shape
    max_logits = torch.empty(rows, dtype=torch.float32, device=partial_max_logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=partial_max_logits.device)
    if rows:
        _reduce_kernel[(rows,)](
            max_logits,
            tokens,
            partial_max_logits,
            partial_tokens,
            count,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(partial_max_logits.device),
        )
    return max_logits, tokens
