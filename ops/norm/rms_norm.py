"""Residual addition and root mean square norm in one pass over the rows."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

FEW = 512
"""Up to so many rows a program takes one, so that all of a GPU works."""
LEAST = 2048
"""Elements a program takes at least when rows are many."""
LEAST_COLUMNS = 128
"""Of a program, which are no work for one warp."""


@triton.jit
def add_norm(x, residual, place, mask, scale, eps, SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """The norm of rows of x + residual at `place`, [rows, columns] float32; the sum overwrites `residual`.

    scale: the norm's weight, [columns] float32. How rows are added up follows from the shape and the number of warps
    (`norm_tile`): with the same ones every kernel comes to the same digits.
    """
    total = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        # What is normalised is what is kept, so that a row means the same to this layer and to the next.
        kept = total.to(residual.dtype.element_ty)
        tl.store(residual + place, kept, mask=mask)
        total = kept.to(tl.float32)
    mean = tl.sum(total * total, axis=1) / SIZE
    return total * tl.rsqrt(mean + eps)[:, None] * scale[None, :]


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    out,
    residual,
    x,
    weight,
    rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait(PDL)
    normed = add_norm(x, residual, place, mask, scale, eps, SIZE, HAS_RESIDUAL)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, in memory of its own, and the sum, which overwrites `residual` (without one: x itself).

    x, residual: [..., size], dense, of one type; weight: [size]. The sum is rounded to that type before it is
    normalised; all arithmetic is float32.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty_like(x)
    size = weight.shape[0]
    rows = x.numel() // size
    total = x if residual is None else residual if residual.is_contiguous() else residual.contiguous()
    if rows == 0:
        return out, total
    block, per_program, warps = norm_tile(size, rows)
    _add_norm_kernel[(-(-rows // per_program),)](
        out,
        total,
        x,
        weight,
        rows,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=per_program,
        HAS_RESIDUAL=residual is not None,
        num_warps=warps,
        **dependent_launch(x.device),
    )
    return out, total


def norm_tile(size: int, rows: int) -> tuple[int, int, int]:
    """Columns (a power of two, LEAST_COLUMNS or more), rows and warps of a program."""
    return _tile(size, rows > FEW)


@cache
def _tile(size: int, many: bool) -> tuple[int, int, int]:
    block = max(triton.next_power_of_2(size), LEAST_COLUMNS)
    rows = max(1, LEAST // block) if many else 1
    return block, rows, min(max(block * rows // 512, 1), 16)
