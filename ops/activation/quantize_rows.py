"""Activations to eight-bit codes with scales, in one pass over the rows."""

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
"""Of a CodeLayout."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: a small float32 added to it is rounded to an integer, ties to even, which stands in the lowest bits."""
FEW = 512
"""Rows: up to so many a warp has LATENT numbers, with more BUSY, so that less is spent on each."""
LATENT, BUSY = 256, 1024
MOST_WARPS = 16
"""So that a multiprocessor has room for two programs, whose registers are full."""
NEXT_TO_NOTHING = tl.constexpr(1e-30)
HALF = tl.constexpr(BLOCK // 2)
"""Of a block: inputs so far apart lie side by side."""


@triton.jit
def magnitudes(values):
    """Of float32 numbers. A NaN's is infinite, so that a row's largest tells whether one of its numbers has no code."""
    return tl.where(values != values, float("inf"), tl.abs(values))


@triton.jit
def scale_of(peak, LIMIT: tl.constexpr):
    """The scale that gives a row's largest number the largest code; 1 for zeros, and for rows that are next to nothing,
    since float32 has no inverse of theirs."""
    return tl.where(peak > NEXT_TO_NOTHING, tl.div_rn(peak, tl.full([], LIMIT, tl.float32)), 1.0)


@triton.jit
def marked(scale, peak):
    """The scale to store: NaN for a row with a NaN or infinity, since int8 has no code that would say so."""
    return tl.where(peak < float("inf"), scale, float("nan"))


@triton.jit
def inverse_of(scale):
    """What numbers are multiplied by."""
    return tl.div_rn(tl.full([], 1.0, tl.float32), scale)


@triton.jit
def to_codes(values, inverse, LIMIT: tl.constexpr, INT8: tl.constexpr, GIVEN: tl.constexpr):
    """What converted to the type of codes is the code: for float8 float32, for int8 int32 with the code in its lowest
    byte, as converting float32 takes a GPU eight times as long. GIVEN: values may be beyond LIMIT."""
    if INT8:
        values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    code = values * inverse
    if GIVEN:
        code = tl.where(code > LIMIT, LIMIT, tl.where(code < -LIMIT, -LIMIT, code))
    return (code + ROUND).to(tl.int32, bitcast=True) if INT8 else code


@triton.jit
def store_row(
    codes,
    scales,
    row,
    left,
    right,
    given,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Quantize and store a row: the halves of its blocks, [BLOCKS, 64] float32 each, zeros beyond its inputs.

    given: its scale, where GIVEN.
    """
    larger = tl.maximum(tl.abs(left), tl.abs(right), propagate_nan=tl.PropagateNan.ALL)
    peak = tl.max(tl.max(magnitudes(larger), axis=1), axis=0)
    scale = given
    if not GIVEN:
        scale = scale_of(peak, LIMIT)
    inverse = inverse_of(scale)
    pairs = tl.join(to_codes(left, inverse, LIMIT, INT8, GIVEN), to_codes(right, inverse, LIMIT, INT8, GIVEN))
    count = tl.cdiv(inputs, 2 * HALF)
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    stored = tl.reshape(pairs, [BLOCKS, 2 * HALF]).to(codes.dtype.element_ty)
    tl.store(codes + row * count * (2 * HALF) + place, stored, mask=(block < count)[:, None])
    tl.store(scales + row, marked(scale, peak))


@triton.jit
def _quantize_kernel(
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
    right_column = left_column + HALF
    scale = 1.0
    if GIVEN:
        scale = tl.load(given)
    wait(PDL)
    here = x + row * inputs
    left = tl.load(here + left_column, mask=left_column < inputs, other=0.0).to(tl.float32)
    right = tl.load(here + right_column, mask=right_column < inputs, other=0.0).to(tl.float32)
    store_row(codes, scales, row, left, right, scale, inputs, LIMIT, INT8, BLOCKS, GIVEN)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, inputs], dense -> codes of `dtype`, and scales: [rows] float32.

    Codes are in the order of a CodeLayout, padded with zeros to a multiple of 128.
    scale: [1] float32, the scale of all rows, known beforehand; codes beyond the type's range are clamped. Without it a
    row's largest number gets the largest code. A row with a NaN or infinity gets a NaN for scale, and any codes.
    """
    return launch_by_rows(_quantize_kernel, x, x.shape[1], dtype, scale)


def launch_by_rows(
    kernel: JITFunction[Any], x: torch.Tensor, inputs: int, dtype: torch.dtype, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What quantize_rows returns, by a kernel with the arguments of its own: a program for each row of x.

    inputs: numbers of a row that are quantized.
    """
    rows = x.shape[0]
    codes, scales = empty_codes(rows, inputs, dtype, x.device)
    if rows:
        kernel[(rows,)](
            codes,
            scales,
            x,
            scales if scale is None else scale,
            inputs,
            LIMIT=max_quantized(dtype),
            INT8=dtype == torch.int8,
            BLOCKS=triton.next_power_of_2(codes.shape[1] // BLOCK),
            GIVEN=scale is not None,
            num_warps=row_warps(rows, inputs),
            **dependent_launch(x.device),
        )
    return codes, scales


def row_warps(rows: int, inputs: int) -> int:
    """Warps for a program that has a row: many where rows are few, and how long one takes is what counts."""
    numbers = LATENT if rows <= FEW else BUSY
    return min(max(int(triton.next_power_of_2(inputs)) // numbers, 1), MOST_WARPS)


def empty_codes(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for codes and scales of so many rows."""
    padded = -(-inputs // BLOCK) * BLOCK
    codes = torch.empty((rows, padded), dtype=dtype, device=device)
    return codes, torch.empty((rows,), dtype=torch.float32, device=device)
