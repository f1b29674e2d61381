"""silu(gate) * up and quantization in one pass over the rows: what a multiplication by codes takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.activation.quantize_rows import HALF, launch_by_rows, store_row
from engine.ops.activation.silu_and_mul import silu
from engine.ops.common.fast_math import round_both
from engine.ops.common.launch import release, wait


@triton.jit
def _activated(x, column, inputs):
    """silu(gate) * up of a row."""
    mask = column < inputs
    gate = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + inputs + column, mask=mask, other=0.0).to(tl.float32)
    return silu(gate) * up


@triton.jit
def _silu_quantize_kernel(
    codes,
    scales,
    x,
    given,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has a row, seen as [BLOCKS, 128]. GIVEN: all rows have the scale at `given`."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    left_column = tl.arange(0, BLOCKS)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    scale = 1.0
    if GIVEN:
        scale = tl.load(given)
    wait(PDL)
    here = x + row * 2 * inputs
    left = _activated(here, left_column, inputs)
    right = _activated(here, left_column + HALF, inputs)
    left, right = round_both(left, right, x.dtype.element_ty)  # as if they had been written
    store_row(codes, scales, row, left, right, scale, inputs, LIMIT, INT8, BLOCKS, GIVEN)


def silu_and_mul_quantize(
    x: torch.Tensor, dtype: torch.dtype, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as quantize_rows makes them of silu_and_mul's result.

    x: [rows, 2 * size], gate and up side by side. dtype, scale: as of quantize_rows.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    return launch_by_rows(_silu_quantize_kernel, x, x.shape[1] // 2, dtype, scale)
