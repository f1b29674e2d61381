"""The largest number of each row and where it is; a row with a NaN shows it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

CHUNK = 4096
"""Columns a program of the first stage takes."""
BLOCK = 1024
"""Partial results the second stage takes at once."""
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def max_and_index(values, index, AXIS: tl.constexpr):
    """Largest value along an axis (NaN if one is), and the lowest index where it is (a NaN counts as -inf there).

    values: float32, -inf outside the row; index: int32, of a shape that broadcasts to it, higher outside than inside.
    """
    broken = tl.max((values != values).to(tl.int32), axis=AXIS)
    clean = tl.where(values != values, float("-inf"), values)
    peak = tl.max(clean, axis=AXIS)
    first = tl.min(tl.where(clean == tl.expand_dims(peak, AXIS), index, NOWHERE), axis=AXIS)
    return tl.where(broken > 0, float("nan"), peak), first


@triton.jit
def _partial_kernel(peaks, tokens, logits, columns, CHUNK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    values = tl.load(logits + row * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    peak, first = max_and_index(values, column, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + place, peak)
    tl.store(tokens + place, first)


@triton.jit(do_not_specialize=["count"])
def _reduce_kernel(peaks, tokens, partial_peaks, partial_tokens, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.full([BLOCK], 2147483647, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    wait(PDL)
    for start in range(0, count, BLOCK):
        place = start + lane
        value = tl.load(partial_peaks + row * count + place, mask=place < count, other=float("-inf"))
        token = tl.load(partial_tokens + row * count + place, mask=place < count, other=2147483647)
        broken = broken | (value != value).to(tl.int32)
        value = tl.where(value != value, float("-inf"), value)
        better = (value > best) | ((value == best) & (token < first))
        best = tl.where(better, value, best)
        first = tl.where(better, token, first)
    peak, token = max_and_index(tl.where(broken > 0, float("nan"), best), first, 0)
    tl.store(peaks + row, peak)
    tl.store(tokens + row, token.to(tl.int64))


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [rows, columns], rows dense -> peaks [rows] float32 and the columns they are in, [rows] int64.

    The first of equals. A row with a NaN has the peak NaN, and some column.
    """
    rows, columns = logits.shape
    if not logits.is_contiguous():
        logits = logits.contiguous()
    chunks = -(-columns // CHUNK)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    if rows:
        _partial_kernel[(rows, chunks)](
            peaks, tokens, logits, columns, CHUNK=CHUNK, num_warps=4, **dependent_launch(logits.device)
        )
    return reduce_max(peaks, tokens)


def reduce_max(partial_peaks: torch.Tensor, partial_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows of partial results: [rows, count] float32 and int32, dense."""
    rows, count = partial_peaks.shape
    peaks = torch.empty(rows, dtype=torch.float32, device=partial_peaks.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=partial_peaks.device)
    if rows:
        _reduce_kernel[(rows,)](
            peaks,
            tokens,
            partial_peaks,
            partial_tokens,
            count,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(partial_peaks.device),
        )
    return peaks, tokens
