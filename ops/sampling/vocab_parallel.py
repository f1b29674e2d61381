"""Kernels of a vocabulary sharded over ranks: embedding look-up, and the most likely token of all ranks.

Each rank fills its own part of a tensor with zeros elsewhere; a sum over the ranks then gives all of them the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.sampling.argmax import max_and_index

BLOCK = 128
"""Rows per program."""


@triton.jit(do_not_specialize=["first", "count"])
def _look_up(out, tokens, table, first, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(tokens + row) - first
    here = (index >= 0) & (index < count)
    column = tl.arange(0, BLOCK)
    vector = tl.load(table + index * SIZE + column, mask=(column < SIZE) & here, other=0.0)
    tl.store(out + row * SIZE + column, vector, mask=column < SIZE)


def look_up(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """The embedding vectors of tokens, zeros for tokens outside the table.

    tokens: [n] int64; table: [rows, size], dense, the vectors of the tokens from `first` on. Returns [n, size].
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
def _place_max_logits(out, max_logits, tokens, rows, first, rank, ranks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    max_logit = tl.load(max_logits + row, mask=mask, other=0.0)
    token = (tl.load(tokens + row, mask=mask, other=0) + first).to(tl.float32)
    nothing = tl.zeros([BLOCK], tl.float32)
    for owner in range(ranks):
        at = (owner * rows + row) * 2
        tl.store(out + at, tl.where(owner == rank, max_logit, nothing), mask=mask)
        tl.store(out + at + 1, tl.where(owner == rank, token, nothing), mask=mask)


def place_max_logits(max_logits: torch.Tensor, tokens: torch.Tensor, first: int, rank: int, ranks: int) -> torch.Tensor:
    """Place a rank's max logits and their tokens among those of all ranks.

    max_logits: [rows] float32; tokens: [rows] int64, counted from `first`. Returns [ranks, rows, 2] float32: max logits
    and tokens, counted from 0, at the index of the rank, zeros elsewhere.
    """
    rows = len(max_logits)
    out = torch.empty((ranks, rows, 2), dtype=torch.float32, device=max_logits.device)
    if rows:
        _place_max_logits[(-(-rows // BLOCK),)](
            out,
            max_logits,
            tokens,
            rows,
            first,
            rank,
            ranks,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(max_logits.device),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _choose_max_logits(
    max_logits,
    tokens,
    candidates,
    rows,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    release(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, SLOTS)
    at = (rank[:, None] * rows + row[None, :]) * 2
    mask = (rank < RANKS)[:, None] & (row < rows)[None, :]
    values = tl.load(candidates + at, mask=mask, other=float("-inf"))
    found = tl.load(candidates + at + 1, mask=mask, other=2147483520.0).to(tl.int32)
    max_logit, token = max_and_index(values, found, 0)
    tl.store(max_logits + row, max_logit, mask=row < rows)
    tl.store(tokens + row, token.to(tl.int64), mask=row < rows)


def choose_max_logits(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest max logit of each row over all ranks, [rows] float32 (NaN if any is NaN), and its token, [rows]
    int64: the first of equals, with a NaN any token.

    candidates: [ranks, rows, 2] float32, dense: max logits and tokens of each rank.
    """
    ranks, rows, _ = candidates.shape
    max_logits = torch.empty(rows, dtype=torch.float32, device=candidates.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=candidates.device)
    if rows:
        _choose_max_logits[(-(-rows // BLOCK),)](
            max_logits,
            tokens,
            candidates,
            rows,
            RANKS=ranks,
            SLOTS=triton.next_power_of_2(ranks),
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(candidates.device),
        )
    return max_logits, tokens
