"""The activation of a gated MLP: silu(gate) * up in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.fast_math import reciprocal
from engine.ops.common.launch import dependent_launch, release, wait

BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x), float32. No intermediate overflows."""
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return x * tl.where(x >= 0, 1.0, small) * reciprocal(1.0 + small)


@triton.jit
def _silu_and_mul_kernel(out, x, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = silu(gate) * up. x: [rows, 2 * size]; out: [rows, size]. Grid: (rows, blocks of a row)."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    wait(PDL)
    gate = tl.load(x + row * 2 * size + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (silu(gate) * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size], gate before up in each row -> silu(gate) * up: [..., size], rounded once."""
    if not x.is_contiguous():
        x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        grid = (out.numel() // size, -(-size // BLOCK))
        _silu_and_mul_kernel[grid](out, x, size, BLOCK=BLOCK, num_warps=4, **dependent_launch(x.device))
    return out
