"""Operations for which a GPU has one instruction that Triton does not expose; the interpreter uses plain arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Whether kernels are compiled to PTX."""


@triton.jit
def reciprocal(x):
    """1 / x within one unit in the last place; 0 for results below 2^-126. x: float32. Source: PTX ISA, rcp.approx."""
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def settled(total):
    """The same float32 numbers as an opaque value: an empty PTX statement, across which Triton moves no work."""
    return tl.inline_asm_elementwise("// $0", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def round_both(left, right, DTYPE: tl.constexpr):
    """Round two float32 numbers to DTYPE; a GPU rounds a pair eight times as fast as a single number."""
    if PTX and DTYPE.is_bf16():
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=tl.int32, is_pure=True, pack=1
        )
        left = (pairs << 16).to(tl.float32, bitcast=True)
        right = (pairs & -0x10000).to(tl.float32, bitcast=True)
    else:
        left = left.to(DTYPE).to(tl.float32)
        right = right.to(DTYPE).to(tl.float32)
    return left, right
