"""Dequantizes the 4-bit weights of a layer's experts to 16 bits, for the grouped GEMM of 16-bit weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.experts.grouped_matmul_4bit import uses_ptx
from engine.ops.experts.pack import BLOCK_INPUTS, SPAN
from engine.ops.experts.unpack import unpack_block
from engine.ops.experts.weights import StackedWeight, WeightFormat

OUTPUTS = 64
"""Rows of a matrix per program."""
_BLOCK = tl.constexpr(BLOCK_INPUTS)
_SPAN = tl.constexpr(SPAN)


@triton.jit
def _dequantize_kernel(
    out,
    values,
    scales,
    factors,
    outputs,
    inputs,
    blocks,
    FP4: tl.constexpr,
    ENTRIES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize a block of OUTPUTS rows. Grid: (blocks of inputs, blocks of rows, experts)."""
    release(PDL)
    expert = tl.program_id(2)
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = row < outputs
    row = tl.where(valid, row, 0)
    first = (expert.to(tl.int64) * blocks + tl.program_id(0)) * outputs
    words = tl.load(values + (first + row)[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :])
    DTYPE: tl.constexpr = out.dtype.element_ty
    weights = unpack_block(words, scales + first * ENTRIES, row, outputs, FP4, ENTRIES, DTYPE, ASM, True)
    if FP4:
        weights = (weights.to(tl.float32) * tl.load(factors + expert)).to(DTYPE)
    column = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    wait(PDL)  # the memory of `out` may still be read
    target = out + (expert.to(tl.int64) * outputs + row)[:, None] * inputs + column[None, :]
    tl.store(target, weights, mask=valid[:, None] & (column < inputs)[None, :])


def dequantize(weight: StackedWeight, inputs: int, dtype: torch.dtype, *, compile_only: bool = False) -> StackedWeight:
    """4-bit weights -> plain ones of `dtype`, [experts, rows, inputs], rounded once; of kind fp4 exact in bfloat16.

    inputs: columns of a matrix, without those that fill the last block. compile_only: compile without a launch.
    """
    values, scales = weight.values, weight.scales
    assert scales is not None
    experts, blocks, outputs, _ = values.shape
    fp4 = weight.format.kind == "fp4"
    out = torch.empty((experts, outputs, inputs), dtype=dtype, device=values.device)
    factors = scales if weight.factors is None else weight.factors
    arguments = (out, values, scales, factors, outputs, inputs, blocks)
    constants = {
        "FP4": fp4,
        "ENTRIES": scales.shape[1] // blocks,
        "OUTPUTS": OUTPUTS,
        "ASM": uses_ptx(out, fp4=fp4),
        "num_warps": 4,
        **dependent_launch(out.device),
    }
    grid = (blocks, -(-outputs // OUTPUTS), experts)
    if compile_only:
        _dequantize_kernel.warmup(*arguments, grid=grid, **constants)
    else:
        _dequantize_kernel[grid](*arguments, **constants)
    return StackedWeight(values=out, format=WeightFormat(kind="plain"))
