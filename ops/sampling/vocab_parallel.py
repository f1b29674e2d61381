"""What ranks that share a vocabulary do before and after they add up: vectors looked up, likeliest tokens compared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.sampling.argmax import max_and_index

BLOCK = 128
"""Rows a program takes."""


@triton.jit(do_not_specialize=["first", "count"])
def _look_up(out, tokens, table, first, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(tokens + row) - first
    here = (place >= 0) & (place < count)
    column = tl.arange(0, BLOCK)
    vector = tl.load(table + place * SIZE + column, mask=(column < SIZE) & here, other=0.0)
    tl.store(out + row * SIZE + column, vector, mask=column < SIZE)


def look_up(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """The vectors of tokens, zeros for those that the table has not.

    tokens: [n] int64; table: [rows, size], dense, of the tokens from `first` on. Returns [n, size].
    """
    rows, size = table.shape
    out = torch.empty((len(tokens), size), dtype=table.dtype, device=table.device)
    if len(tokens):
        _look_up[(len(tokens),)](
            out,
            tokens,
            table,
            first,
            rows,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=4,
            **dependent_launch(table.device),
        )
    return out


@triton.jit(do_not_specialize=["rows", "first", "rank", "ranks"])
def _place_peaks(out, peaks, tokens, rows, first, rank, ranks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    peak = tl.load(peaks + row, mask=mask, other=0.0)
    token = (tl.load(tokens + row, mask=mask, other=0) + first).to(tl.float32)
    nothing = tl.zeros([BLOCK], tl.float32)
    for owner in range(ranks):
        at = (owner * rows + row) * 2
        tl.store(out + at, tl.where(owner == rank, peak, nothing), mask=mask)
        tl.store(out + at + 1, tl.where(owner == rank, token, nothing), mask=mask)


def place_peaks(peaks: torch.Tensor, tokens: torch.Tensor, first: int, rank: int, ranks: int) -> torch.Tensor:
    """peaks: [rows] float32, and their tokens, [rows] int64, counted from `first` -> [ranks, rows, 2] float32: both in
    the rank's place, tokens counted from 0, and zeros elsewhere."""
    rows = len(peaks)
    out = torch.empty((ranks, rows, 2), dtype=torch.float32, device=peaks.device)
    if rows:
        _place_peaks[(-(-rows // BLOCK),)](
            out, peaks, tokens, rows, first, rank, ranks, BLOCK=BLOCK, num_warps=4, **dependent_launch(peaks.device)
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _choose_peaks(
    peaks, tokens, candidates, rows, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, SLOTS)
    at = (rank[:, None] * rows + row[None, :]) * 2
    mask = (rank < RANKS)[:, None] & (row < rows)[None, :]
    values = tl.load(candidates + at, mask=mask, other=float("-inf"))
    found = tl.load(candidates + at + 1, mask=mask, other=2147483520.0).to(tl.int32)
    peak, token = max_and_index(values, found, 0)
    tl.store(peaks + row, peak, mask=row < rows)
    tl.store(tokens + row, token.to(tl.int64), mask=row < rows)


def choose_peaks(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """candidates: [ranks, rows, 2] float32, peaks and tokens, dense -> the largest peak of each row, [rows] float32
    (NaN if one is), and its token, [rows] int64: the first of equals, with a NaN some token."""
    ranks, rows, _ = candidates.shape
    peaks = torch.empty(rows, dtype=torch.float32, device=candidates.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=candidates.device)
    if rows:
        _choose_peaks[(-(-rows // BLOCK),)](
            peaks,
            tokens,
            candidates,
            rows,
            RANKS=ranks,
            SLOTS=triton.next_power_of_2(ranks),
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(candidates.device),
        )
    return peaks, tokens
