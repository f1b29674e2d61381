"""Grouped GEMM of 4-bit weights, dequantized in registers: see ops/experts/pack.py and ops/experts/unpack.py.

The words of a tile of W are loaded into shared memory and read in the layout of the first operand of the tensor cores,
and each of their fields is a part of that operand: no weight moves between threads. Weights are multiplied scaled. Of
kind fp4 they are exact. In tiles of few rows, weights of kind int4 with a group per block are multiplied as integers,
and the sums of each block are scaled: that takes fewer instructions, and nothing is rounded.

Triton multiplies tiles of 8 rows by mma.sync, in which a warp does not wait for others, and larger ones by wgmma.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from engine.ops.activation.act_and_mul import activate
from engine.ops.common.fast_math import PTX, settled
from engine.ops.common.launch import dependent_launch, has_capability, release, wait
from engine.ops.experts.pack import BLOCK_INPUTS, SPAN
from engine.ops.experts.unpack import int4_scale, unpack_block

if TYPE_CHECKING:
    from engine.ops.experts.grouped_matmul import GroupedTile
    from engine.ops.experts.sort import SortedPairs
    from engine.ops.experts.weights import StackedWeight

_BLOCK = tl.constexpr(BLOCK_INPUTS)
_SPAN = tl.constexpr(SPAN)
MAX_ROWS_OF_SCALED_SUMS = 16
"""Rows of a tile up to which sums are scaled. Of more rows there are more sums than weights to be scaled."""
WARPGROUP = 4
"""Warps that execute a matrix instruction of Hopper together."""
RUN = tl.constexpr(8)
"""Rows of gate and of up alternate in runs of this length in a tile: a thread that holds a sum of a row of gate also
holds that of the row of up, this many rows further on."""


@triton.jit
def _rows_of(begin, outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """For each of a tile's rows of W: the output that it belongs to, and its number in the matrix.

    begin: the tile's first output. Beyond the last output it is row 0, which is computed and not stored.
    """
    lane = tl.arange(0, ROWS)
    if GATED:
        output = begin + lane // (2 * RUN) * RUN + lane % RUN
        row = output + lane // RUN % 2 * outputs
    else:
        output = begin + lane
        row = output
    return output, tl.where(output < outputs, row, 0)


@triton.jit
def _matmul_kernel(
    out,
    x,
    values,
    scales,
    factors,
    bias,
    order,
    tile_experts,
    tile_begins,
    tile_ends,
    inputs,
    outputs,
    blocks,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FP4: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALED_SUMS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    SETTLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of `launch`. Grid: (blocks of the results, tiles).

    BLOCK_N: rows of W; with ACTIVATION >= 0 half of them are gate's and half up's. ENTRIES: of scales per block.
    SCALED_SUMS: integers are multiplied and the sums of each block scaled; of kind int4 with one entry per block. ASM:
    as `unpack_block` says. SETTLE: the products of a block end before the next block is unpacked. The rest as in
    grouped_matmul._grouped_kernel.
    """
    GATED: tl.constexpr = ACTIVATION >= 0
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    DTYPE: tl.constexpr = x.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE.is_fp32() else "tf32"  # tf32 changes nothing for 16 bits
    tile = tl.program_id(1)
    wait(PDL)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        m = tl.load(tile_begins + tile) + tl.arange(0, BLOCK_M)
        present = m < tl.load(tile_ends + tile)
        pair = m
        if GATHER or SCATTER:
            pair = tl.load(order + m, mask=present, other=0)
        x_row = x + (pair // TOP_K if GATHER else m).to(tl.int64)[:, None] * inputs
        begin = tl.program_id(0) * OUTPUTS
        output, row = _rows_of(begin, outputs, BLOCK_N, GATED)
        matrix_rows = outputs * 2 if GATED else outputs
        matrix_blocks = expert.to(tl.int64) * blocks * matrix_rows
        scales += matrix_blocks * ENTRIES
        place = values + matrix_blocks * _SPAN + row[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            words = tl.load(place + block * matrix_rows * _SPAN)
            entries = scales + block * ENTRIES * matrix_rows
            column = block * _BLOCK + tl.arange(0, _BLOCK)
            mask = present[:, None] & (column < inputs)[None, :]
            columns = tl.load(x_row + column[None, :], mask=mask, other=0.0)
            w = unpack_block(words, entries, row, matrix_rows, FP4, ENTRIES, DTYPE, ASM, not SCALED_SUMS)
            if SCALED_SUMS:
                scale = int4_scale(tl.load(entries + row), DTYPE)
                total += tl.dot(w, tl.trans(columns), input_precision=PRECISION) * scale[:, None]
            else:
                total = tl.dot(w, tl.trans(columns), total, input_precision=PRECISION)
            # Without this, the products of a block may overlap with unpacking the next one, and of one warpgroup ptxas
            # then lets each product wait for the one before (C7515).
            if SETTLE:
                total = settled(total)
        if FP4:
            total *= tl.load(factors + expert)
        if BIAS:
            total += tl.load(bias + expert * matrix_rows + row).to(tl.float32)[:, None]
        if GATED:
            pairs = tl.permute(tl.reshape(total, [OUTPUTS // RUN, 2, RUN, BLOCK_M]), [0, 2, 3, 1])
            gate, up = tl.split(pairs)
            total = tl.reshape(activate(gate, up, ACTIVATION), [OUTPUTS, BLOCK_M])
            output = begin + tl.arange(0, OUTPUTS)
        target = (pair if SCATTER else m).to(tl.int64)
        place = out + target[None, :] * outputs + output[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=present[None, :] & (output < outputs)[:, None])
    release(PDL)  # late, as a long kernel: see ops/common/launch.py


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedWeight,
    pairs: SortedPairs,
    tile_rows: int,
    tile: GroupedTile,
    *,
    top_k: int,
    gather: bool,
    scatter: bool,
    activation: int,
    bias: torch.Tensor | None,
    compile_only: bool = False,
) -> None:
    """Write to `out`, [pairs, outputs]. activation: -1 or a value of ACTIVATIONS. The rest as in grouped_matmul."""
    fp4 = weight.format.kind == "fp4"
    scales = weight.scales
    assert scales is not None
    blocks = weight.values.shape[1]
    arguments = (
        out,
        x,
        weight.values,
        scales,
        scales if weight.factors is None else weight.factors,
        scales if bias is None else bias,
        pairs.order,
        pairs.tile_experts,
        pairs.tile_begins,
        pairs.tile_ends,
        x.shape[1],
        out.shape[1],
        blocks,
    )
    entries = scales.shape[1] // blocks
    asm = uses_ptx(x, fp4=fp4)
    rows = tile.outputs * 2 if activation >= 0 else tile.outputs
    constants = {
        "TOP_K": top_k,
        "GATHER": gather,
        "SCATTER": scatter,
        "ACTIVATION": activation,
        "FP4": fp4,
        "ENTRIES": entries,
        "SCALED_SUMS": not fp4 and entries == 1 and tile_rows <= MAX_ROWS_OF_SCALED_SUMS,
        "BIAS": bias is not None,
        "BLOCK_M": tile_rows,
        "BLOCK_N": rows,
        "STAGES": tile.stages,
        "ASM": asm,
        "SETTLE": asm and tile.warps == WARPGROUP,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    grid = (-(-out.shape[1] // tile.outputs), len(pairs.tile_experts))
    if compile_only:
        _matmul_kernel.warmup(*arguments, grid=grid, **constants)
    elif len(out):
        _matmul_kernel[grid](*arguments, **constants)


def uses_ptx(x: torch.Tensor, *, fp4: bool) -> bool:
    """Whether weights for x are unpacked by PTX, which computes with pairs of bfloat16 from capability 8.0 on."""
    dtypes = (torch.bfloat16,) if fp4 else (torch.bfloat16, torch.float16)
    return PTX.value and x.dtype in dtypes and has_capability(x.device, (8, 0))
