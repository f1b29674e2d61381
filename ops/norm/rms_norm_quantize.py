"""Residual addition, norm and quantization in one pass over the rows, for a GEMM of quantized values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.activation.quantize_rows import (
    HALF,
    PER_ROW,
    Scaling,
    abs_or_inf,
    clamped,
    empty_quantized,
    inverse_scale,
    row_scale,
    scale_or_nan,
    to_quantized,
)
from engine.ops.common.launch import dependent_launch_of_rows, release, wait
from engine.ops.common.limits import max_quantized
from engine.ops.norm.rms_norm import add_norm, memory_of_sum, norm_tile, padded


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _norm_quantize_kernel(
    codes,
    scales,
    residual,
    x,
    second,
    third,
    fourth,
    weight,
    given,
    rows,
    scale_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDENDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    POWERS: tl.constexpr,
    MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = tl.full([ROWS], 1.0, tl.float32)
    if STATIC_SCALE:
        scale *= tl.load(given)
    wait(PDL)
    normed = add_norm(x, second, third, fourth, residual, place, mask, factor, eps, SIZE, ADDENDS, HAS_RESIDUAL)
    # Rounded as if the norm had been stored, so that quantized values equal those of two separate kernels.
    values = clamped(normed.to(x.dtype.element_ty).to(tl.float32), MAX)
    if PER_BLOCK:
        blocks = tl.reshape(values, [ROWS, BLOCK // (2 * HALF), 2 * HALF])
        peak = tl.max(abs_or_inf(blocks), axis=2)
        scale = row_scale(peak, LIMIT, POWERS)
        quantized = to_quantized(blocks, inverse_scale(scale)[:, :, None], LIMIT, INT8, STATIC_SCALE)
    else:
        peak = tl.max(abs_or_inf(values), axis=1)
        if not STATIC_SCALE:
            scale = row_scale(peak, LIMIT, POWERS)
        quantized = to_quantized(values, inverse_scale(scale)[:, None], LIMIT, INT8, STATIC_SCALE)
    found = quantized.to(codes.dtype.element_ty)
    # Stored in another shape than loaded, so that the compiler does not lay out the row for this store: the order of
    # summation must stay that of add_rms_norm.
    halves = tl.reshape(found, [ROWS, BLOCK // (2 * HALF), 2, HALF])
    pairs = tl.reshape(tl.permute(halves, [0, 1, 3, 2]), [ROWS, BLOCK // (2 * HALF), 2 * HALF])
    count: tl.constexpr = (SIZE + 2 * HALF - 1) // (2 * HALF)
    block = tl.arange(0, BLOCK // (2 * HALF))
    target = (row.to(tl.int64)[:, None] * count + block[None, :])[:, :, None] * (2 * HALF)
    present = (row < rows)[:, None] & (block < count)[None, :]
    tl.store(codes + target + tl.arange(0, 2 * HALF)[None, None, :], pairs, mask=present[:, :, None])
    if PER_BLOCK:
        tl.store(scales + block[None, :] * scale_stride + row[:, None], scale_or_nan(scale, peak), mask=present)
    else:
        tl.store(scales + row, scale_or_nan(scale, peak), mask=row < rows)


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    scaling: Scaling = PER_ROW,
    others: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantized values and scales of add_rms_norm's result, as quantize_rows computes them, and the sum x + residual.

    x, residual: [rows, size] of one 16-bit dtype; weight: [size]. The sum and `others` are as in
    add_rms_norm; dtype, scale, scaling as in quantize_rows.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    rows, size = x.shape
    total = memory_of_sum(x, residual, others)
    codes, scales = empty_quantized(rows, size, dtype, x.device, per_block=scaling.per_block)
    if rows:
        block, per_program, warps = norm_tile(size, rows)
        _norm_quantize_kernel[(-(-rows // per_program),)](
            codes,
            scales,
            total,
            x,
            *padded(x, others),
            weight,
            scales if scale is None else scale,
            rows,
            scales.shape[-1],
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=per_program,
            ADDENDS=1 + len(others),
            HAS_RESIDUAL=residual is not None,
            LIMIT=max_quantized(dtype),
            INT8=dtype == torch.int8,
            STATIC_SCALE=scale is not None,
            **scaling.constants,
            num_warps=warps,
            **dependent_launch_of_rows(x.device, rows),
        )
    return codes, scales, total
