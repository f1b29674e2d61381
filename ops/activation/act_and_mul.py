"""The activation of a gated MLP in one kernel: the activated gate times the up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.fast_math import reciprocal
from engine.ops.common.launch import dependent_launch, release, wait

BLOCK = 1024
SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
SWIGLU_OAI = tl.constexpr(3)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU, "swiglu_oai": SWIGLU_OAI}
"""Names of activations -> the constexpr ACTIVATION of kernels."""


@triton.jit
def times_sigmoid(x, z):
    """x * sigmoid(z), float32. No intermediate overflows."""
    small = tl.exp2(tl.abs(z) * -1.4426950408889634)
    return x * tl.where(z >= 0, 1.0, small) * reciprocal(1.0 + small)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """The activated gate times up, float32.

    SWIGLU_OAI is gpt-oss's clamped SwiGLU: gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up between
    -7 and 7.
    """
    if ACTIVATION == SILU:
        value = times_sigmoid(gate, gate) * up
    elif ACTIVATION == GELU_TANH:  # with (1 + tanh(z)) / 2 = sigmoid(2 z)
        value = times_sigmoid(gate, 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == GELU:
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        gate = tl.where(gate > 7.0, 7.0, gate)  # a NaN stays one
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        value = times_sigmoid(gate, 1.702 * gate) * (up + 1.0)
    return value


@triton.jit
def _act_and_mul_kernel(out, x, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = act(gate) * up. x: [rows, 2 * size]; out: [rows, size]. Grid: (rows, blocks of a row)."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    wait(PDL)
    gate = tl.load(x + row * 2 * size + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, activate(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=mask)


def act_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """x: [..., 2 * size], gate before up in each row -> act(gate) * up: [..., size], rounded once.

    activation: one of ACTIVATIONS.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        grid = (out.numel() // size, -(-size // BLOCK))
        code = ACTIVATIONS[activation].value
        _act_and_mul_kernel[grid](out, x, size, ACTIVATION=code, BLOCK=BLOCK, num_warps=4, **dependent_launch(x.device))
    return out
