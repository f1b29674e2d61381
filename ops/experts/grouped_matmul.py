"""Grouped GEMM: rows sorted by expert, each times the matrix of its expert, in 16 bits or fewer, summed in float32.

A program computes a tile of W x^T: outputs of W by rows of x, so that few rows fill the tensor cores and weights are
their first operand, which may come from registers, where they are converted. With a gated activation it computes the
same outputs of gate and up, and activates them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.activation.act_and_mul import ACTIVATIONS, activate
from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.experts import grouped_matmul_4bit, persistent_grouped
from engine.ops.experts.sort import SortedPairs
from engine.ops.experts.weights import BLOCK, StackedWeight

PLAIN = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
KINDS = {"plain": PLAIN, "channel": CHANNEL, "block": BLOCKS}
NO_ACTIVATION = -1
_BLOCK = tl.constexpr(BLOCK)


@frozen(kw_only=True)
class GroupedTile:
    """A tile of a grouped GEMM."""

    outputs: int
    """Rows of W; of gate and of up where both are computed."""
    block_k: int
    """Inputs per loop iteration, as `WeightFormat.block_k` says."""
    warps: int
    stages: int
    """Software pipeline stages."""
    persistent: bool = False
    """Whether the persistent kernel computes it (persistent_grouped.py), on a GPU with wgmma."""

    def __str__(self) -> str:
        more = ", persistent" if self.persistent else ""
        return f"{self.outputs}x{self.block_k}, {self.warps} warps, {self.stages} stages{more}"


@triton.jit
def _dot(w, x, total, dtype: tl.constexpr):
    """total + w x^T. w: [outputs, inputs], converted to x's dtype; x: [rows, inputs]."""
    if dtype == tl.float32:
        total = tl.dot(w.to(dtype), tl.trans(x), total, input_precision="ieee")
    elif dtype == tl.int8:
        total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
    else:
        total = tl.dot(w.to(dtype), tl.trans(x), total)
    return total


@triton.jit
def _add_bytes(
    total,
    w,
    x,
    scales,
    n,
    valid,
    start,
    inputs,
    x_scale,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    X_SCALES: tl.constexpr,
):
    """total + w x^T of values w, [outputs, inputs of this iteration]. x_scale: [rows], of this block (X_SCALES)."""
    if KIND == BLOCKS:
        zero = tl.zeros([total.shape[0], total.shape[1]], tl.float32)
        part = _dot(w, x, zero, x.dtype)
        place = n // SCALE_ROWS * tl.cdiv(inputs, _BLOCK) + start // _BLOCK
        part *= tl.load(scales + place, mask=valid, other=0.0)[:, None]
        if X_SCALES:
            part *= x_scale[None, :]
        total += part
    else:
        total = _dot(w, x, total, x.dtype)
    return total


@triton.jit
def _finish(
    total,
    n,
    valid,
    scales,
    bias,
    x_scale,
    KIND: tl.constexpr,
    X_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The sums in float32, scaled, with the bias. scales, bias: of the expert. x_scale: [rows]."""
    total = total.to(tl.float32)
    if KIND == CHANNEL:
        total *= tl.load(scales + n, mask=valid, other=0.0)[:, None]
        if X_SCALES:
            total *= x_scale[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _grouped_kernel(
    out,
    x,
    x_scales,
    values,
    scales,
    bias,
    order,
    tile_experts,
    tile_begins,
    tile_ends,
    inputs,
    outputs,
    row_bytes,
    scale_stride,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    X_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of `grouped_matmul`. Grid: (blocks of the results, tiles).

    Neighbours read the same rows of x, and an expert's tiles are neighbours too, so that both stay in the L2 cache.
    values: [experts, matrix rows, row_bytes] elements; scale_stride: scales per expert. outputs: columns of the result;
    a matrix has as many rows, or twice as many with ACTIVATION >= 0. GATHER: rows of x are tokens, not sorted pairs.
    SCATTER: rows of the result are in the order of the pairs' numbers, not sorted. X_SCALES: x is quantized, with a
    scale per row, or per row and 128 inputs (KIND BLOCKS).
    """
    GATED: tl.constexpr = ACTIVATION >= 0
    tile = tl.program_id(1)
    wait(PDL)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        m = tl.load(tile_begins + tile) + tl.arange(0, BLOCK_M)
        present = m < tl.load(tile_ends + tile)
        pair = m
        if GATHER or SCATTER:
            pair = tl.load(order + m, mask=present, other=0)
        row = (pair // TOP_K if GATHER else m).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n < outputs
        matrix_rows = outputs * 2 if GATED else outputs
        values += expert.to(tl.int64) * matrix_rows * row_bytes
        scales += expert.to(tl.int64) * scale_stride
        bias += expert * matrix_rows
        sums: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
        first = tl.zeros([BLOCK_N, BLOCK_M], sums)
        second = tl.zeros([BLOCK_N, BLOCK_M], sums)
        first_row = values + n.to(tl.int64)[:, None] * row_bytes
        second_row = first_row + outputs.to(tl.int64) * row_bytes
        x_row = x + row[:, None] * inputs
        x_scale = tl.zeros([BLOCK_M], tl.float32)
        if X_SCALES and KIND == CHANNEL:
            x_scale = tl.load(x_scales + row, mask=present, other=0.0)
        for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            within = (k < inputs)[None, :]
            here = tl.load(x_row + k[None, :], mask=present[:, None] & within, other=0.0)
            if X_SCALES and KIND == BLOCKS:
                x_scale = tl.load(x_scales + row * tl.cdiv(inputs, _BLOCK) + start // _BLOCK, mask=present, other=0.0)
            w = tl.load(first_row + k[None, :], mask=valid[:, None] & within, other=0.0)
            first = _add_bytes(first, w, here, scales, n, valid, start, inputs, x_scale, KIND, SCALE_ROWS, X_SCALES)
            if GATED:
                w = tl.load(second_row + k[None, :], mask=valid[:, None] & within, other=0.0)
                second = _add_bytes(
                    second, w, here, scales, n + outputs, valid, start, inputs, x_scale, KIND, SCALE_ROWS, X_SCALES
                )
        result = _finish(first, n, valid, scales, bias, x_scale, KIND, X_SCALES, BIAS)
        if GATED:
            up = _finish(second, n + outputs, valid, scales, bias, x_scale, KIND, X_SCALES, BIAS)
            result = activate(result, up, ACTIVATION)
        target = (pair if SCATTER else m).to(tl.int64)
        place = out + target[None, :] * outputs + n[:, None]
        tl.store(place, result.to(out.dtype.element_ty), mask=present[None, :] & valid[:, None])
    release(PDL)  # late, as a long kernel: see ops/common/launch.py


def grouped_matmul(
    x: torch.Tensor,
    weight: StackedWeight,
    pairs: SortedPairs,
    tile_rows: int,
    tile: GroupedTile,
    *,
    dtype: torch.dtype,
    top_k: int = 1,
    gather: bool = False,
    scatter: bool = False,
    activation: str | None = None,
    bias: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """Each row of x times the matrix of its expert, in `dtype`: [pairs, outputs].

    x: [pairs, inputs] in the order of `pairs`, or with gather [tokens, inputs]; contiguous. scatter: the result's rows
    are in the order of the pairs' numbers, not of `pairs`. Rows of pairs that are left out are not written. tile_rows:
    the value that `pairs` was sorted with, at least 8. activation: the matrices are gate and up, [experts, 2 * outputs,
    inputs], and the result is act(gate) * up. bias: [experts, rows of a matrix]. x_scales: x is quantized, to float8 or
    int8: [rows] float32 for kind channel, [rows, blocks of 128] for kind block. tile: a persistent one only for what
    persistent_grouped.launch supports. compile_only: compile without a launch.
    """
    form = weight.format
    rows, inputs = len(pairs.order), x.shape[1]
    outputs = weight.outputs // 2 if activation is not None else weight.outputs
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    code = NO_ACTIVATION if activation is None else ACTIVATIONS[activation].value
    if form.is_4bit:
        grouped_matmul_4bit.launch(
            out,
            x,
            weight,
            pairs,
            tile_rows,
            tile,
            top_k=top_k,
            gather=gather,
            scatter=scatter,
            activation=code,
            bias=bias,
            compile_only=compile_only,
        )
        return out
    if tile.persistent:
        if rows:
            persistent_grouped.launch(
                out,
                x,
                weight,
                pairs,
                top_k=top_k,
                gather=gather,
                scatter=scatter,
                activation=code,
                bias=bias,
                x_scales=x_scales,
                compile_only=compile_only,
            )
        return out
    scales = weight.values if weight.scales is None else weight.scales
    arguments = (
        out,
        x,
        x if x_scales is None else x_scales,
        weight.values,
        scales,
        weight.values if bias is None else bias,
        pairs.order,
        pairs.tile_experts,
        pairs.tile_begins,
        pairs.tile_ends,
        inputs,
        outputs,
        weight.values.shape[2],
        0 if weight.scales is None else weight.scales.stride(0),
    )
    constants = {
        "TOP_K": top_k,
        "GATHER": gather,
        "SCATTER": scatter,
        "ACTIVATION": code,
        "KIND": KINDS[form.kind].value,
        "SCALE_ROWS": form.scale_rows,
        "BIAS": bias is not None,
        "X_SCALES": x_scales is not None,
        "BLOCK_M": tile_rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    grid = (-(-outputs // tile.outputs), len(pairs.tile_experts))
    if compile_only:
        _grouped_kernel.warmup(*arguments, grid=grid, **constants)
    elif rows:
        _grouped_kernel[grid](*arguments, **constants)
    return out
