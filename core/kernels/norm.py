"""Residual addition and root mean square norm in one pass over the rows."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from engine.core.kernels.launch import dependent_launch, release, wait

FEW = 512
"""Up to so many rows a program takes one, so that all of a GPU works."""
LEAST = 2048
"""Elements a program takes at least when rows are many."""


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
    total = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        # What is normalised is what is kept, so that a row means the same to this layer and to the next.
        kept = total.to(residual.dtype.element_ty)
        tl.store(residual + place, kept, mask=mask)
        total = kept.to(tl.float32)
    mean = tl.sum(total * total, axis=1) / SIZE
    normed = total * tl.rsqrt(mean + eps)[:, None] * scale[None, :]
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
    block, per_program, warps = _tile(size, rows > FEW)
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


@cache
def _tile(size: int, many: bool) -> tuple[int, int, int]:
    """Columns (a power of two), rows and warps of a program."""
    block = triton.next_power_of_2(size)
    rows = max(1, LEAST // block) if many else 1
    return block, rows, min(max(block * rows // 512, 1), 16)
