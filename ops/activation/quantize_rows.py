"""Quantizes activations per row to float8 or int8, for the W8A8 GEMM: values and a scale per row, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.common.limits import max_quantized

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

BLOCK = 128
"""Inputs per block of a W8Layout."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 rounds that to an integer, ties to even, in the lowest bits."""
FEW_ROWS = 512
"""Up to this many rows a warp has NUMBERS_FEW_ROWS numbers of a row, for latency; with more rows NUMBERS_MANY_ROWS, for
throughput."""
NUMBERS_FEW_ROWS, NUMBERS_MANY_ROWS = 256, 1024
MAX_WARPS = 16
"""Maximum per program: two programs whose registers are full then fit a multiprocessor."""
MIN_MAX_ABS = tl.constexpr(1e-30)
HALF = tl.constexpr(BLOCK // 2)
"""Half a block. A W8Layout stores inputs i and i + HALF of a block next to each other."""


@triton.jit
def abs_or_inf(values):
    """|x| of float32 numbers; infinity for NaN, so that the row's maximum shows whether any number is not finite."""
    return tl.where(values != values, float("inf"), tl.abs(values))


@triton.jit
def row_scale(max_abs, LIMIT: tl.constexpr):
    """The scale that maps a row's max_abs to LIMIT. 1 for rows of (nearly) zeros, whose scale has no inverse in
    float32."""
    return tl.where(max_abs > MIN_MAX_ABS, tl.div_rn(max_abs, tl.full([], LIMIT, tl.float32)), 1.0)


@triton.jit
def scale_or_nan(scale, max_abs):
    """The scale to store: NaN for a row with a NaN or infinity, which int8 values cannot represent."""
    return tl.where(max_abs < float("inf"), scale, float("nan"))


@triton.jit
def inverse_scale(scale):
    """1 / scale, which numbers are multiplied by."""
    return tl.div_rn(tl.full([], 1.0, tl.float32), scale)


@triton.jit
def to_quantized(values, inverse, LIMIT: tl.constexpr, INT8: tl.constexpr, STATIC_SCALE: tl.constexpr):
    """Quantize; the caller converts the result to the quantized dtype.

    Float8: float32 values. Int8: int32 with the value in the lowest byte, as converting float32 directly takes a GPU
    eight times as long. STATIC_SCALE: values may exceed LIMIT and are clamped.
    """
    if INT8:
        values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    quantized = values * inverse
    if STATIC_SCALE:
        quantized = tl.where(quantized > LIMIT, LIMIT, tl.where(quantized < -LIMIT, -LIMIT, quantized))
    return (quantized + ROUND).to(tl.int32, bitcast=True) if INT8 else quantized


@triton.jit
def store_row(
    quantized,
    scales,
    row,
    left,
    right,
    static_scale,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
):
    """Quantize and store a row in the order of a W8Layout.

    left, right: the halves of the row's blocks, [BLOCKS, HALF] float32 each, 0 beyond its inputs. static_scale: the
    row's scale if STATIC_SCALE, else unused and the scale is computed from the row's maximum.
    """
    larger = tl.maximum(tl.abs(left), tl.abs(right), propagate_nan=tl.PropagateNan.ALL)
    max_abs = tl.max(tl.max(abs_or_inf(larger), axis=1), axis=0)
    scale = static_scale
    if not STATIC_SCALE:
        scale = row_scale(max_abs, LIMIT)
    inverse = inverse_scale(scale)
    pairs = tl.join(
        to_quantized(left, inverse, LIMIT, INT8, STATIC_SCALE), to_quantized(right, inverse, LIMIT, INT8, STATIC_SCALE)
    )
    count = tl.cdiv(inputs, 2 * HALF)
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    stored = tl.reshape(pairs, [BLOCKS, 2 * HALF]).to(quantized.dtype.element_ty)
    tl.store(quantized + row * count * (2 * HALF) + place, stored, mask=(block < count)[:, None])
    tl.store(scales + row, scale_or_nan(scale, max_abs))


@triton.jit
def _quantize_kernel(
    quantized,
    scales,
    x,
    static_scale,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize x by rows. A program computes a row, as [BLOCKS, 128]. Grid: (rows,).

    quantized: [rows, inputs padded to 128], float8 or int8; scales: [rows] float32; x: [rows, inputs]. STATIC_SCALE:
    all rows use the scale at `static_scale`, [1] float32.
    """
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    left_column = tl.arange(0, BLOCKS)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    right_column = left_column + HALF
    scale = 1.0
    if STATIC_SCALE:
        scale = tl.load(static_scale)
    wait(PDL)
    here = x + row * inputs
    left = tl.load(here + left_column, mask=left_column < inputs, other=0.0).to(tl.float32)
    right = tl.load(here + right_column, mask=right_column < inputs, other=0.0).to(tl.float32)
    store_row(quantized, scales, row, left, right, scale, inputs, LIMIT, INT8, BLOCKS, STATIC_SCALE)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations: x [rows, inputs], contiguous -> values of `dtype` and scales, [rows] float32.

    Values are [rows, inputs padded with zeros to a multiple of 128], in the order of a W8Layout. scale: [1] float32,
    the static scale of all rows; values beyond the dtype's range are clamped. None: a row's largest number maps to the
    dtype's largest value. A row with a NaN or infinity gets a scale of NaN, and unspecified values.
    """
    return launch_by_rows(_quantize_kernel, x, x.shape[1], dtype, scale)


def launch_by_rows(
    kernel: JITFunction[Any],
    x: torch.Tensor,
    inputs: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    **constants: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a kernel with the arguments of `_quantize_kernel`: one program per row of x. Returns values and scales.

    inputs: quantized numbers per row. constants: more constexprs of the kernel.
    """
    rows = x.shape[0]
    quantized, scales = empty_quantized(rows, inputs, dtype, x.device)
    if rows:
        kernel[(rows,)](
            quantized,
            scales,
            x,
            scales if scale is None else scale,
            inputs,
            LIMIT=max_quantized(dtype),
            INT8=dtype == torch.int8,
            BLOCKS=triton.next_power_of_2(quantized.shape[1] // BLOCK),
            STATIC_SCALE=scale is not None,
            num_warps=row_warps(rows, inputs),
            **constants,
            **dependent_launch(x.device),
        )
    return quantized, scales


def row_warps(rows: int, inputs: int) -> int:
    """Warps of a program that computes a row: more where there are few rows, since latency then dominates."""
    numbers = NUMBERS_FEW_ROWS if rows <= FEW_ROWS else NUMBERS_MANY_ROWS
    return min(max(int(triton.next_power_of_2(inputs)) // numbers, 1), MAX_WARPS)


def empty_quantized(
    rows: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate values and scales for a number of rows."""
    padded = -(-inputs // BLOCK) * BLOCK
    quantized = torch.empty((rows, padded), dtype=dtype, device=device)
    return quantized, torch.empty((rows,), dtype=torch.float32, device=device)
