"""Quantizes activations to float8 or int8, for the W8A8 GEMM: values, and a scale per row or per block of 128 inputs of
a row, in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from attrs import field, frozen

from engine.ops.common.launch import dependent_launch_of_rows, release, wait
from engine.ops.common.limits import max_quantized

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

BLOCK = 128
"""Inputs per block of a W8Layout."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 rounds the number to an integer, ties to even, in the lowest bits."""
FEW_ROWS = 512
"""Up to this many rows a warp has NUMBERS_FEW_ROWS numbers of a row, for latency; with more rows NUMBERS_MANY_ROWS, for
throughput."""
NUMBERS_FEW_ROWS, NUMBERS_MANY_ROWS = 256, 1024
MAX_WARPS = 16
"""Maximum per program: two programs whose registers are full then fit a multiprocessor."""
MIN_MAX_ABS = tl.constexpr(1e-30)
HALF = tl.constexpr(BLOCK // 2)
"""Half a block. A W8Layout stores inputs i and i + HALF of a block next to each other."""
ROW_MULTIPLE = 4
"""Scales of blocks have room for a multiple of this many rows, as cuBLAS needs."""
VALUE_ROW_MULTIPLE = 128
"""Values have room for a multiple of this many rows, as many as the tiles of the W8A8 GEMM for up to 256 rows read: TMA
takes longer to fill missing rows with zeros than to load rows."""


@frozen(kw_only=True)
class Scaling:
    """How the scales of quantized activations are computed."""

    per_block: bool = False
    """Whether each block of 128 inputs of a row has a scale of its own. False: each row has."""
    powers_of_two: bool = False
    """Whether scales are rounded up to powers of two."""
    max_activation: float = 0.0
    """Numbers beyond +-max_activation are clamped to it. 0: none are."""

    constants: Mapping[str, object] = field(init=False, eq=False, repr=False)
    """Constexprs of the kernels."""

    @constants.default
    def _make_constants(self) -> Mapping[str, object]:
        return {"PER_BLOCK": self.per_block, "POWERS": self.powers_of_two, "MAX": self.max_activation}

    def __str__(self) -> str:
        shared = "a scale per 128 inputs" if self.per_block else "a scale per row"
        bound = f", clamped to {self.max_activation:g}" if self.max_activation else ""
        return f"{shared}{', a power of two' if self.powers_of_two else ''}{bound}"


PER_ROW = Scaling()


@triton.jit
def abs_or_inf(values):
    """|x| of float32 numbers; infinity for NaN, so that the row's maximum shows whether any number is not finite."""
    return tl.where(values != values, float("inf"), tl.abs(values))


@triton.jit
def row_scale(max_abs, LIMIT: tl.constexpr, POWERS: tl.constexpr):
    """The scale that maps max_abs of a row or block to LIMIT, with POWERS rounded up to a power of two.

    1 for (nearly) zeros, whose scale has no inverse in float32.
    """
    scale = tl.where(max_abs > MIN_MAX_ABS, tl.div_rn(max_abs, tl.full([], LIMIT, tl.float32)), 1.0)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def clamped(values, MAX: tl.constexpr):
    """Values clamped to +-MAX, unless that is 0. NaN stays NaN."""
    if MAX > 0:
        values = tl.where(values > MAX, MAX, tl.where(values < -MAX, -MAX, values))
    return values


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
    scale_stride,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    POWERS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Quantize and store a row in the order of a W8Layout.

    left, right: the halves of the row's blocks, [BLOCKS, HALF] float32 each, 0 beyond its inputs. static_scale: the
    row's scale if STATIC_SCALE, else unused and scales are computed from maxima. scale_stride: between the scales of a
    row's blocks, if PER_BLOCK. The rest: see `Scaling`.
    """
    left = clamped(left, MAX)
    right = clamped(right, MAX)
    larger = tl.maximum(tl.abs(left), tl.abs(right), propagate_nan=tl.PropagateNan.ALL)
    max_abs = tl.max(abs_or_inf(larger), axis=1)
    if not PER_BLOCK:
        max_abs = tl.max(max_abs, axis=0)
    scale = static_scale
    if not STATIC_SCALE:
        scale = row_scale(max_abs, LIMIT, POWERS)
    inverse = inverse_scale(scale)
    if PER_BLOCK:
        inverse = inverse[:, None]
    pairs = tl.join(
        to_quantized(left, inverse, LIMIT, INT8, STATIC_SCALE), to_quantized(right, inverse, LIMIT, INT8, STATIC_SCALE)
    )
    count = tl.cdiv(inputs, 2 * HALF)
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    stored = tl.reshape(pairs, [BLOCKS, 2 * HALF]).to(quantized.dtype.element_ty)
    tl.store(quantized + row * count * (2 * HALF) + place, stored, mask=(block < count)[:, None])
    if PER_BLOCK:
        tl.store(scales + block * scale_stride + row, scale_or_nan(scale, max_abs), mask=block < count)
    else:
        tl.store(scales + row, scale_or_nan(scale, max_abs))


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
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
    PDL: tl.constexpr,
):
    """Quantize x by rows. A program computes a row, as [BLOCKS, 128]. Grid: (rows,).

    quantized: [rows, inputs padded to 128], float8 or int8; scales: [rows] float32, with PER_BLOCK [blocks,
    scale_stride]; x: [rows, inputs]. STATIC_SCALE: all rows use the scale at `static_scale`, [1] float32.
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


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, scale: torch.Tensor | None = None, scaling: Scaling = PER_ROW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations: x [rows, inputs], contiguous -> values of `dtype` and scales, float32.

    Values are [rows, inputs padded with zeros to a multiple of 128], in the order of a W8Layout. Scales are [rows], or
    with scaling.per_block [blocks, rows rounded up to ROW_MULTIPLE]. The memory of the values has room for rows rounded
    up to VALUE_ROW_MULTIPLE, a multiple of ROW_MULTIPLE: torch's kernel for scales of blocks reads a row of values per
    column of scales.
    scale: [1] float32, the static scale of all rows; values beyond the dtype's range are clamped. None: the largest
    magnitude of a row or block maps to the dtype's largest value. A row or block with a NaN or infinity gets a scale of
    NaN, and unspecified values.
    """
    return launch_by_rows(_quantize_kernel, x, x.shape[1], dtype, scale, scaling)


def launch_by_rows(
    kernel: JITFunction[Any],
    x: torch.Tensor,
    inputs: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    scaling: Scaling,
    **constants: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a kernel with the arguments of `_quantize_kernel`: one program per row of x. Returns values and scales.

    inputs: quantized numbers per row. constants: more constexprs of the kernel.
    """
    rows = x.shape[0]
    quantized, scales = empty_quantized(rows, inputs, dtype, x.device, per_block=scaling.per_block)
    if rows:
        kernel[(rows,)](
            quantized,
            scales,
            x,
            scales if scale is None else scale,
            inputs,
            scales.shape[-1],
            LIMIT=max_quantized(dtype),
            INT8=dtype == torch.int8,
            BLOCKS=triton.next_power_of_2(quantized.shape[1] // BLOCK),
            STATIC_SCALE=scale is not None,
            **scaling.constants,
            num_warps=row_warps(rows, inputs),
            **constants,
            **dependent_launch_of_rows(x.device, rows),
        )
    return quantized, scales


def row_warps(rows: int, inputs: int) -> int:
    """Warps of a program that computes a row: more where there are few rows, since latency then dominates."""
    numbers = NUMBERS_FEW_ROWS if rows <= FEW_ROWS else NUMBERS_MANY_ROWS
    return min(max(int(triton.next_power_of_2(inputs)) // numbers, 1), MAX_WARPS)


def empty_quantized(
    rows: int, inputs: int, dtype: torch.dtype, device: torch.device, *, per_block: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate values and scales for a number of rows, in the shapes that quantize_rows describes."""
    blocks = -(-inputs // BLOCK)
    padded = -(-rows // VALUE_ROW_MULTIPLE) * VALUE_ROW_MULTIPLE
    quantized = torch.empty((padded, blocks * BLOCK), dtype=dtype, device=device)[:rows]
    size = (blocks, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE) if per_block else (rows,)
    return quantized, torch.empty(size, dtype=torch.float32, device=device)
