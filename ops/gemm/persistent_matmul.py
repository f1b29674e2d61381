"""Persistent W8A8 GEMM in Gluon, for prefill on GPUs with wgmma (Hopper): x W^T of quantized x and W.

There is one program per multiprocessor, which loops over tiles. While a tile is scaled and stored, the inputs of the
next are loaded by TMA. Two wgmma steps are in flight at a time. Triton's own loop keeps two in flight only with float32
accumulators (its WGMMAPipeline.cpp): with int8 it waits for every step, and the tensor cores idle meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.common import gluon_copies
from engine.ops.common.gluon_tiles import halves
from engine.ops.common.launch import dependent_launch, num_sms, release, wait
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.split_k import add_others, is_last
from engine.ops.gemm.tile_order import SWIZZLE, loaded_shape, place_of_tile, share_of_inputs

if TYPE_CHECKING:
    from engine.ops.gemm.scaled_matmul import W8A8Tile

MAX_INT8_WIDTH = gl.constexpr(128)
"""Outputs per wgmma instruction of int8: the compiler supports no wider ones."""
MAX_PIECE = 64
"""Outputs per TMA store, at most: 128 bytes per row."""
ALIGNMENT = 8
"""The number of outputs must be a multiple of this, so that rows of the result start at multiples of 16 bytes."""


@gluon.jit
def fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, pred, PARTS: gl.constexpr = 1):
    """Start loading a stage's tile of W. The stage's barrier completes when that of x has arrived too, in PARTS."""
    barrier = filled.index(stage)
    mbarrier.expect(barrier, PARTS * x.block_type.nbytes + weight.block_type.nbytes, pred=pred)
    gluon_copies.tma_load(weight, [begin_n, start], barrier, weight_stages.index(stage), pred=pred)


@gluon.jit
def _fetch_x(x, x_stages, filled, stage, begin_m, start, pred):
    """Start loading a stage's tile of x, after that of W."""
    gluon_copies.tma_load(x, [begin_m, start], filled.index(stage), x_stages.index(stage), pred=pred)


@gluon.jit
def step(
    tile, begin_m, begin_n, start, rows, outputs, first, end, BLOCK_K: gl.constexpr, SIZES: gl.constexpr,
    STRIP: gl.constexpr = SWIZZLE,
):  # fmt: skip
    """The position to load next: further inputs of a tile, or the first inputs of this program's next tile."""
    start += BLOCK_K
    if start >= end:
        start = first
        tile += gl.num_programs(0)
        begin_m, begin_n = place_of_tile(tile, rows, outputs, SIZES[0], SIZES[1], STRIP)
    return tile, begin_m, begin_n, start


@gluon.jit
def send(out, pieces, values, begin_m, begin_n, NUMBER: gl.constexpr):
    """Store a piece of a tile, some of its columns, by TMA. Two shared-memory buffers alternate: the other may still be
    read from. A tile has an even number of pieces, so its first buffer is not the last of the tile before."""
    piece = pieces.index(NUMBER % 2)
    tma.store_wait(1)
    piece.store(values)
    fence_async_shared()
    gluon_copies.tma_store(out, [begin_m, begin_n + NUMBER * out.block_shape[1]], piece)


@gluon.jit
def scaled(total, x_scale, scale, bias, BIAS: gl.constexpr):
    """The outputs of a tile, float32. x_scale: [BLOCK_M]; scale, bias: [BLOCK_N], in any layout."""
    line: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    result = total.to(gl.float32) * gl.expand_dims(gl.convert_layout(scale, line), 0) * gl.expand_dims(x_scale, 1)
    if BIAS:
        result += gl.expand_dims(gl.convert_layout(bias, line).to(gl.float32), 0)
    return result


@gluon.jit
def store(out, pieces, total, x_scale, scale, bias, begin_m, begin_n, BIAS: gl.constexpr):
    """Scale and store a tile."""
    left, right = halves(scaled(total, x_scale, scale, bias, BIAS).to(out.dtype))
    if 2 * out.block_shape[1] == total.shape[1]:
        send(out, pieces, left, begin_m, begin_n, 0)
        send(out, pieces, right, begin_m, begin_n, 1)
    else:
        values = halves(left)
        send(out, pieces, values[0], begin_m, begin_n, 0)
        send(out, pieces, values[1], begin_m, begin_n, 1)
        values = halves(right)
        send(out, pieces, values[0], begin_m, begin_n, 2)
        send(out, pieces, values[1], begin_m, begin_n, 3)


@gluon.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    out,
    x,
    weight,
    x_scale,
    scale,
    bias,
    partials,
    arrivals,
    rows,
    outputs,
    inputs,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = (x W^T) * x_scale * scale + bias. Grid: (programs, SPLITS); at most one program per tile, with SPLITS > 1
    exactly one.

    out, x, weight: descriptors of [rows, outputs], [rows, inputs] and [outputs, inputs]. The rest as in
    scaled_matmul._matmul_kernel. Loads run STAGES - 1 steps ahead of the products, across tiles.
    """
    BLOCK_M: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    INTEGER: gl.constexpr = x.dtype == gl.int8
    WIDTH: gl.constexpr = min(BLOCK_N, MAX_INT8_WIDTH) if INTEGER else BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDTH, 32]
    )
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    release(PDL)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    weight_stages = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    pieces = gl.allocate_shared_memory(out.dtype, [2, BLOCK_M, out.block_shape[1]], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, BLOCK_N)
    next_tile = gl.program_id(0)
    next_m, next_n = place_of_tile(next_tile, rows, outputs, BLOCK_M, BLOCK_N)
    first = 0
    end = inputs
    if SPLITS > 1:
        first, end = share_of_inputs(inputs, BLOCK_K, SPLITS)
        if first >= end:
            next_tile = tiles  # there is nothing to fetch
    next_start = first
    begin = (next_tile, next_m, next_n, next_start)
    for stage in gl.static_range(STAGES - 1):  # weights, which no earlier kernel writes
        fetch_weight(x, weight, weight_stages, filled, stage, next_n, next_start, next_tile < tiles)
        next_tile, next_m, next_n, next_start = step(
            next_tile, next_m, next_n, next_start, rows, outputs, first, end, BLOCK_K, (BLOCK_M, BLOCK_N)
        )
    wait(PDL)
    next_tile, next_m, next_n, next_start = begin
    for stage in gl.static_range(STAGES - 1):
        _fetch_x(x, x_stages, filled, stage, next_m, next_start, next_tile < tiles)
        next_tile, next_m, next_n, next_start = step(
            next_tile, next_m, next_n, next_start, rows, outputs, first, end, BLOCK_K, (BLOCK_M, BLOCK_N)
        )
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        begin_m, begin_n = place_of_tile(tile, rows, outputs, BLOCK_M, BLOCK_N)
        m = begin_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA))
        n = begin_n + gl.arange(0, BLOCK_N, LINE)
        # Loaded now, so that they have arrived when the sums are complete.
        row_scale = gl.load(x_scale + m, mask=m < rows, other=0.0)
        output_scale = gl.load(scale + n, mask=n < outputs, other=0.0)
        output_bias = gl.load(bias + n, mask=n < outputs, other=0.0) if BIAS else output_scale
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.int32 if INTEGER else gl.float32, MMA)
        for _ in range(first, end, BLOCK_K):
            mbarrier.wait(filled.index(stage), phase)
            left = x_stages.index(stage)
            right = weight_stages.index(stage).permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total, left, right])[0]
            # The previous step is complete, so its stage is free.
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            fetch_weight(x, weight, weight_stages, filled, free, next_n, next_start, next_tile < tiles)
            _fetch_x(x, x_stages, filled, free, next_m, next_start, next_tile < tiles)
            next_tile, next_m, next_n, next_start = step(
                next_tile, next_m, next_n, next_start, rows, outputs, first, end, BLOCK_K, (BLOCK_M, BLOCK_N)
            )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(0, deps=[total])
        if SPLITS > 1:
            lane = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA)), 1) * BLOCK_N
            lane += gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA)), 0)
            mine = partials + tile * (SPLITS * BLOCK_M * BLOCK_N)
            if is_last(total, lane, mine, arrivals + tile, SPLITS):
                total = add_others(total, lane, mine, arrivals + tile, SPLITS)
                store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
        else:
            store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
    tma.store_wait(0)


def launch(
    out: torch.Tensor,
    operands: ScaledOperands,
    tile: W8A8Tile,
    workspace: Workspace,
    *,
    compile_only: bool = False,
) -> None:
    """Write to `out`, [rows, outputs], a 16-bit dtype. The rest as in scaled_matmul.matmul. x: of at least one row.

    compile_only: compile without a launch, as the active triton.AsyncCompileMode says. tile: of 32 to 256 outputs.
    """
    piece = min(tile.outputs // 2, MAX_PIECE)
    layout_8_bit = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    layout_16_bit = gl.NVMMASharedLayout(swizzle_byte_width=2 * piece, element_bitwidth=16, rank=2)
    x = operands.x
    arguments = (
        TensorDescriptor.from_tensor(out, [tile.rows, piece], layout_16_bit),
        TensorDescriptor(x, *loaded_shape(x, tile.rows), [tile.rows, tile.block_k], layout_8_bit),
        TensorDescriptor.from_tensor(operands.weight, [tile.outputs, tile.block_k], layout_8_bit),
        *operands.scales_and_bias,
        *operands.memory_of_splits(workspace),
        *out.shape,
        x.shape[1],
    )
    constants = {
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "BIAS": operands.bias is not None,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    if compile_only:
        _matmul_kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        programs = tile.programs(*out.shape)
        if tile.splits == 1:
            programs = min(programs, num_sms(x.device))
        _matmul_kernel[(programs, tile.splits)](*arguments, **constants)
