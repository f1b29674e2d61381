"""The activation of a gated MLP and quantization of the result in one kernel, for the W8A8 GEMM that follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.activation.act_and_mul import ACTIVATIONS, activate
from engine.ops.activation.quantize_rows import HALF, PER_ROW, Scaling, launch_by_rows, store_row
from engine.ops.common.fast_math import round_both
from engine.ops.common.launch import release, wait


@triton.jit
def _activated(x, column, inputs, ACTIVATION: tl.constexpr):
    """act(gate) * up of some columns of a row, float32. x: the row, [2 * inputs]."""
    mask = column < inputs
    gate = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + inputs + column, mask=mask, other=0.0).to(tl.float32)
    return activate(gate, up, ACTIVATION)


@triton.jit(do_not_specialize=["scale_stride"])
def _act_quantize_kernel(
    quantized,
    scales,
    x,
    static_scale,
    inputs,
    scale_stride,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    POWERS: tl.constexpr,
    MAX: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """quantize_rows of act(gate) * up. A program computes a row, as [BLOCKS, 128]. Grid: (rows,).

    x: [rows, 2 * inputs]; the rest as in quantize_rows._quantize_kernel.
    """
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    left_column = tl.arange(0, BLOCKS)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    scale = 1.0
    if STATIC_SCALE:
        scale = tl.load(static_scale)
    wait(PDL)
    here = x + row * 2 * inputs
    left = _activated(here, left_column, inputs, ACTIVATION)
    right = _activated(here, left_column + HALF, inputs, ACTIVATION)
    left, right = round_both(left, right, x.dtype.element_ty)  # as act_and_mul stores them
    store_row(
        quantized,
        scales,
        row,
        left,
        right,
        scale,
        inputs,
        scale_stride,
        LIMIT,
        INT8,
        BLOCKS,
        STATIC_SCALE,
        PER_BLOCK,
        POWERS,
        MAX,
    )


def act_and_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    activation: str = "silu",
    *,
    scale: torch.Tensor | None = None,
    scaling: Scaling = PER_ROW,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rows of act_and_mul's result, bit for bit: [rows, size padded to 128] values, and scales.

    x: [rows, 2 * size], gate before up in each row. activation: as in act_and_mul. dtype, scale, scaling: as in
    quantize_rows.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    code = ACTIVATIONS[activation].value
    return launch_by_rows(_act_quantize_kernel, x, x.shape[1] // 2, dtype, scale, scaling, ACTIVATION=code)
