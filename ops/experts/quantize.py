"""Quantizes activations for the grouped GEMM: with a scale per row, or per row and block of 128 inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.activation.quantize_rows import abs_or_inf, inverse_scale, row_scale, scale_or_nan, to_quantized
from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.common.limits import max_quantized

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _quantize_kernel(
    quantized,
    scales,
    x,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row of x, as [BLOCKS, 128]. Grid: (rows,)."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = column < inputs
    wait(PDL)
    values = tl.load(x + row * inputs + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(abs_or_inf(values), axis=1)
    count = tl.cdiv(inputs, _BLOCK)
    if PER_BLOCK:
        scale = row_scale(largest, LIMIT, False)
        inverse = inverse_scale(scale)[:, None]
        tl.store(scales + row * count + block, scale_or_nan(scale, largest), mask=block < count)
    else:
        largest_of_row = tl.max(largest, axis=0)
        scale_of_row = row_scale(largest_of_row, LIMIT, False)
        inverse = inverse_scale(scale_of_row)
        tl.store(scales + row, scale_or_nan(scale_of_row, largest_of_row))
    result = to_quantized(values, inverse, LIMIT, INT8, False)
    tl.store(quantized + row * inputs + column, result.to(quantized.dtype.element_ty), mask=mask)


def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, per_block: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inputs], contiguous -> values of `dtype`, in the same order, and float32 scales: [rows], or per block
    [rows, blocks of 128 inputs].

    A row or block with a NaN or infinity gets a scale of NaN, and unspecified values.
    """
    rows, inputs = x.shape
    blocks = -(-inputs // BLOCK)
    quantized = torch.empty_like(x, dtype=dtype)
    scales = torch.empty((rows, blocks) if per_block else (rows,), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            quantized,
            scales,
            x,
            inputs,
            LIMIT=max_quantized(dtype),
            INT8=dtype == torch.int8,
            BLOCKS=triton.next_power_of_2(blocks),
            PER_BLOCK=per_block,
            num_warps=min(max(triton.next_power_of_2(inputs) // 1024, 1), 8),
            **dependent_launch(x.device),
        )
    return quantized, scales
