"""The experts of one token: two kernels without matrix units, as reading the weights takes all the time.

The first computes gate, up and activation of each expert, the second the weighted sum of all experts' outputs. A
program multiplies a few rows of W with x: all its loads are in flight together, and threads exchange sums at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.activation.act_and_mul import ACTIVATIONS, activate
from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.experts.grouped_matmul import BLOCKS, CHANNEL, KINDS
from engine.ops.experts.weights import BLOCK, StackedWeight

KINDS_OF_ONE_TOKEN = ("plain", "channel", "block")
"""Kinds of weights that these kernels read."""
_BLOCK = tl.constexpr(BLOCK)


@frozen(kw_only=True)
class RowsTile:
    """A program's share of a matrix."""

    outputs: int
    """Rows of W; of gate and of up where both are computed."""
    block_k: int
    """Maximum inputs per loop iteration: a power of two, at least 128."""
    warps: int


GATE_UP = {size: RowsTile(outputs=4 // size, block_k=2048, warps=4) for size in (1, 2, 4)}
"""Bytes of a weight -> tile of the first kernel."""
DOWN = RowsTile(outputs=4, block_k=256, warps=4)
DOWN_REGISTERS = 128
"""Maximum registers per thread of the second kernel, so that a multiprocessor runs four programs: with 132
multiprocessors, all programs of 2,048 outputs run concurrently."""


@triton.constexpr_function
def _vector(dtype):
    """Elements of 16 bytes, which a thread loads at a time."""
    return 128 // dtype.primitive_bitwidth


@triton.jit
def _load_rows(values, expert, matrix_rows, n, valid, start, inputs, BLOCK_K: tl.constexpr):
    """BLOCK_K inputs from `start` on of rows n of an expert's matrix: [rows, BLOCK_K]. 0 for an expert of -1."""
    k = start + tl.arange(0, BLOCK_K)
    row = tl.where(expert >= 0, expert, 0).to(tl.int64) * matrix_rows + n
    mask = (valid & (expert >= 0))[:, None] & (k < inputs)[None, :]
    return tl.load(values + row[:, None] * inputs + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_all_rows(values, experts, n, valid, start, inputs, outputs, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """`_load_rows` of each of the token's experts."""
    found = (_load_rows(values, tl.load(experts), outputs, n, valid, start, inputs, BLOCK_K),)
    for slot in tl.static_range(1, TOP_K):
        w = _load_rows(values, tl.load(experts + slot), outputs, n, valid, start, inputs, BLOCK_K)
        found = found + (w,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _partial_sums(w, scales, n, valid, x, start, inputs, KIND: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """w x, scaled, float32, summed per vector: [rows, inputs of w / vector]. w: [rows, inputs from `start` on].

    The inputs of a vector are one thread's, so summing them moves no data.
    """
    ROWS: tl.constexpr = w.shape[0]
    BLOCK_K: tl.constexpr = w.shape[1]
    VECTOR: tl.constexpr = _vector(w.dtype)
    k = start + tl.arange(0, BLOCK_K)
    values = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
    product = tl.reshape(w.to(tl.float32) * values[None, :], [ROWS, BLOCK_K // VECTOR, VECTOR])
    sums = tl.sum(product, axis=2)
    if KIND == CHANNEL:
        sums *= tl.load(scales + n, mask=valid, other=0.0)[:, None]
    if KIND == BLOCKS:
        block = start // _BLOCK + tl.arange(0, BLOCK_K // _BLOCK)
        count = tl.cdiv(inputs, _BLOCK)
        place = (n // SCALE_ROWS * count)[:, None] + block[None, :]
        scale = tl.load(scales + place, mask=valid[:, None] & (block < count)[None, :], other=0.0)
        sums = tl.reshape(sums, [ROWS, BLOCK_K // _BLOCK, _BLOCK // VECTOR]) * scale[:, :, None]
        sums = tl.reshape(sums, [ROWS, BLOCK_K // VECTOR])
    return sums


@triton.jit
def _gate_up_kernel(
    out,
    x,
    values,
    scales,
    bias,
    experts,
    inputs,
    outputs,
    scale_stride,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """act(gate) * up of one expert: out [experts of the token, outputs]. Grid: (blocks of outputs, experts)."""
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < outputs
    wait(PDL)
    expert = tl.load(experts + slot).to(tl.int64)
    if expert >= 0:
        scales += expert * scale_stride
        rows = outputs * 2
        VECTOR: tl.constexpr = _vector(values.dtype.element_ty)
        gate = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
        for start in range(0, inputs, BLOCK_K):
            w = _load_rows(values, expert, rows, n, valid, start, inputs, BLOCK_K)
            other = _load_rows(values, expert, rows, n + outputs, valid, start, inputs, BLOCK_K)
            gate += _partial_sums(w, scales, n, valid, x, start, inputs, KIND, SCALE_ROWS)
            up += _partial_sums(other, scales, n + outputs, valid, x, start, inputs, KIND, SCALE_ROWS)
        gate = tl.sum(gate, axis=1)
        up = tl.sum(up, axis=1)
        if BIAS:
            bias += expert * outputs * 2
            gate += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)
            up += tl.load(bias + outputs + n, mask=valid, other=0.0).to(tl.float32)
        result = activate(gate, up, ACTIVATION)
        tl.store(out + slot * outputs + n, result.to(out.dtype.element_ty), mask=valid)
    release(PDL)  # late, as a long kernel: see ops/common/launch.py


@triton.jit
def _down_kernel(
    out,
    x,
    values,
    scales,
    bias,
    experts,
    factors,
    inputs,
    outputs,
    scale_stride,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [outputs] = the sum of the experts' outputs times their factors. Grid: (blocks of outputs,).

    x: [TOP_K, inputs]. All experts' weights for the next inputs are loaded while the current ones are multiplied, and
    those for the first inputs while the preceding kernel, which computes x, ends: that kernel started after the
    routing. An expert of -1 adds nothing, whatever its row of x holds.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < outputs
    w = _load_all_rows(values, experts, n, valid, 0, inputs, outputs, TOP_K, BLOCK_K)
    wait(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K // _vector(values.dtype.element_ty)], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        following = _load_all_rows(values, experts, n, valid, start + BLOCK_K, inputs, outputs, TOP_K, BLOCK_K)
        for slot in tl.static_range(TOP_K):
            expert = tl.load(experts + slot)
            factor = tl.where(expert >= 0, tl.load(factors + slot), 0.0)
            of_expert = scales + tl.where(expert >= 0, expert, 0).to(tl.int64) * scale_stride
            sums = _partial_sums(w[slot], of_expert, n, valid, x + slot * inputs, start, inputs, KIND, SCALE_ROWS)
            total += tl.where(expert >= 0, sums, 0.0) * factor
        w = following
    result = tl.sum(total, axis=1)
    if BIAS:
        for slot in tl.static_range(TOP_K):
            expert = tl.load(experts + slot)
            row = bias + tl.where(expert >= 0, expert, 0).to(tl.int64) * outputs + n
            value = tl.load(row, mask=valid & (expert >= 0), other=0.0).to(tl.float32)
            result += value * tl.where(expert >= 0, tl.load(factors + slot), 0.0)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=valid)
    release(PDL)


def experts_of_one_token(
    x: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    activation: str,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_tile: RowsTile | None = None,
    down_tile: RowsTile = DOWN,
) -> torch.Tensor:
    """The sum of one token's experts, times their factors: [1, hidden], in x's dtype.

    x: [1, hidden], contiguous; experts: [1, top_k] int32, -1 counts for nothing; factors: [1, top_k] float32. gate_up:
    [experts, 2 * intermediate, hidden], down: [experts, hidden, intermediate], of a kind of KINDS_OF_ONE_TOKEN.
    gate_up_tile: None: as GATE_UP says.
    """
    gate_up_tile = gate_up_tile or GATE_UP[gate_up.values.element_size()]
    top_k = experts.shape[1]
    hidden = torch.empty((top_k, down.values.shape[2]), dtype=x.dtype, device=x.device)
    out = x.new_empty((1, down.outputs))
    settings = dependent_launch(x.device)
    _gate_up_kernel[(-(-hidden.shape[1] // gate_up_tile.outputs), top_k)](
        hidden,
        x,
        *_operands(gate_up, gate_up_bias),
        experts,
        x.shape[1],
        hidden.shape[1],
        _scale_stride(gate_up),
        ACTIVATION=ACTIVATIONS[activation].value,
        **_constants(gate_up, gate_up_bias, gate_up_tile),
        **settings,
    )
    _down_kernel[(-(-out.shape[1] // down_tile.outputs),)](
        out,
        hidden,
        *_operands(down, down_bias),
        experts,
        factors,
        hidden.shape[1],
        out.shape[1],
        _scale_stride(down),
        TOP_K=top_k,
        **_constants(down, down_bias, down_tile),
        **({"maxnreg": DOWN_REGISTERS} if x.is_cuda and torch.version.hip is None else {}),
        **settings,
    )
    return out


def _operands(weight: StackedWeight, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """values, scales and bias; values stand in for a tensor that does not exist, and are not read as such."""
    values = weight.values
    return values, values if weight.scales is None else weight.scales, values if bias is None else bias


def _scale_stride(weight: StackedWeight) -> int:
    return 0 if weight.scales is None else weight.scales.stride(0)


def _constants(weight: StackedWeight, bias: torch.Tensor | None, tile: RowsTile) -> dict[str, int | bool]:
    inputs = max(triton.next_power_of_2(weight.values.shape[2]), BLOCK)
    return {
        "KIND": KINDS[weight.format.kind].value,
        "SCALE_ROWS": weight.format.scale_rows,
        "BIAS": bias is not None,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": min(tile.block_k, inputs),
        "num_warps": tile.warps,
    }
