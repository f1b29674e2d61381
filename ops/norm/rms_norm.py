"""Residual addition and root mean square norm in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch_of_rows, release, wait
from engine.ops.common.row_memory import empty_with_room

MAX_SINGLE_ROWS = 512
"""Up to this many rows, each program computes one row, so that all of a GPU has work."""
MIN_ELEMENTS = 2048
"""Elements per program, at least, with more rows."""
MIN_COLUMNS = 128
"""Columns per program, at least: fewer would leave threads of a warp idle."""
MAX_ADDENDS = 4
"""Maximum number of tensors that a kernel adds before the residual."""


@triton.jit
def add_norm(
    x,
    second,
    third,
    fourth,
    residual,
    place,
    mask,
    scale,
    eps,
    SIZE: tl.constexpr,
    ADDENDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The norm of the sum of x, further addends and `residual` in rows at offsets `place`: [rows, columns] float32. The
    sum overwrites `residual`, which without one is memory for the sum, or x itself if x is the only addend.

    The sum of the first ADDENDS of x, second, third and fourth is rounded, as if it had been stored. scale: the norm's
    weight, [columns] float32.
    """
    total = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if ADDENDS > 1:
        total += tl.load(second + place, mask=mask, other=0.0).to(tl.float32)
        if ADDENDS > 2:
            total += tl.load(third + place, mask=mask, other=0.0).to(tl.float32)
        if ADDENDS > 3:
            total += tl.load(fourth + place, mask=mask, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if ADDENDS > 1 or HAS_RESIDUAL:
        # The norm is of the rounded sum that is stored, so that this layer and the next see the same residual.
        kept = total.to(residual.dtype.element_ty)
        tl.store(residual + place, kept, mask=mask)
        total = kept.to(tl.float32)
    return norm_of_rows(total, scale, eps, SIZE)


@triton.jit
def norm_of_rows(total, scale, eps, SIZE: tl.constexpr):
    """The norm of rows, [rows, columns] float32, which are 0 from column SIZE on. scale: [columns] float32.

    The order of summation follows from the shape and the number of warps (`norm_tile`): kernels in which these are
    equal compute equal digits.
    """
    mean = tl.sum(total * total, axis=1) / SIZE
    return total * tl.rsqrt(mean + eps)[:, None] * scale[None, :]


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    out,
    residual,
    x,
    second,
    third,
    fourth,
    weight,
    rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDENDS: tl.constexpr,
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
    normed = add_norm(x, second, third, fourth, residual, place, mask, scale, eps, SIZE, ADDENDS, HAS_RESIDUAL)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    others: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, in new memory, and the sum x + residual.

    x, residual: [..., size], dense, of one dtype; weight: [size]. The sum overwrites `residual`; without one the sum is
    x itself. It is rounded to x's dtype before it is normalized; all arithmetic is float32.
    others: at most MAX_ADDENDS - 1, like x and contiguous; added to x first, in their order, and that sum rounded to
    x's dtype, too. None of them is overwritten: without a `residual`, the sum is in new memory.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    out = empty_with_room(x, tuple(x.shape))
    size = weight.shape[0]
    rows = x.numel() // size
    total = memory_of_sum(x, residual, others)
    if rows == 0:
        return out, total
    block, per_program, warps = norm_tile(size, rows)
    _add_norm_kernel[(-(-rows // per_program),)](
        out,
        total,
        x,
        *padded(x, others),
        weight,
        rows,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=per_program,
        ADDENDS=1 + len(others),
        HAS_RESIDUAL=residual is not None,
        num_warps=warps,
        **dependent_launch_of_rows(x.device, rows),
    )
    return out, total


def memory_of_sum(x: torch.Tensor, residual: torch.Tensor | None, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where a kernel stores the sum that it normalizes; `residual` itself if it is contiguous."""
    if residual is None:
        return torch.empty_like(x) if others else x
    return residual if residual.is_contiguous() else residual.contiguous()


def padded(x: torch.Tensor, others: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """MAX_ADDENDS - 1 arguments of a kernel: the other addends, and x for those that the kernel does not read."""
    return (*others, *(x,) * (MAX_ADDENDS - 1 - len(others)))


def norm_tile(size: int, rows: int) -> tuple[int, int, int]:
    """Columns (a power of two, at least MIN_COLUMNS), rows and warps per program."""
    return _tile(size, rows > MAX_SINGLE_ROWS)


@cache
def _tile(size: int, many: bool) -> tuple[int, int, int]:
    block = max(triton.next_power_of_2(size), MIN_COLUMNS)
    rows = max(1, MIN_ELEMENTS // block) if many else 1
    return block, rows, min(max(block * rows // 512, 1), 16)
