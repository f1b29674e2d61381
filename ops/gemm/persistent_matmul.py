"""Persistent W8A8 GEMM in Gluon, for prefill on GPUs with wgmma (Hopper): x W^T of quantized x and W.

There is one program per multiprocessor, which loops over tiles. While a tile is scaled and stored, the inputs of the
next are loaded by TMA. Two wgmma steps are in flight at a time. Triton's own loop keeps two in flight only with float32
accumulators (its WGMMAPipeline.cpp): with int8 it waits for every step, and the tensor cores idle meanwhile.

Large tiles have specialized warps: one loads, and two warpgroups each multiply, scale and store one half of a tile's
rows. They share only the stages of inputs.
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
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.split_k import add_others, is_last
from engine.ops.gemm.tile_order import SWIZZLE, loaded_shape, place_of_tile, share_of_inputs

if TYPE_CHECKING:
    from engine.ops.gemm.scaled_matmul import W8A8Tile

MAX_INT8_WIDTH = gl.constexpr(128)
"""Outputs per wgmma instruction of int8: the compiler supports no wider ones."""
MAX_PIECE = 64
"""Outputs per TMA store, at most: 128 bytes per row."""
STRIP = gl.constexpr(16)
"""As tile_order.SWIZZLE, for tiles with specialized warps: W is read from memory half as often."""
CONSUMERS = gl.constexpr(2)
"""Warpgroups that multiply, where warps are specialized."""
CONSUMER_ROWS = 64
"""Rows of x per such warpgroup."""
CONSUMER_OUTPUTS = 256
"""Outputs of a tile whose warps are specialized."""
ALIGNMENT = 8
"""The number of outputs must be a multiple of this, so that rows of the result start at multiples of 16 bytes."""


@gluon.jit
def _fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, pred, PARTS: gl.constexpr = 1):
    """Start loading a stage's tile of W. The stage's barrier completes when that of x has arrived too, in PARTS."""
    barrier = filled.index(stage)
    mbarrier.expect(barrier, PARTS * x.block_type.nbytes + weight.block_type.nbytes, pred=pred)
    gluon_copies.tma_load(weight, [begin_n, start], barrier, weight_stages.index(stage), pred=pred)


@gluon.jit
def _fetch_x(x, x_stages, filled, stage, begin_m, start, pred):
    """Start loading a stage's tile of x, after that of W."""
    gluon_copies.tma_load(x, [begin_m, start], filled.index(stage), x_stages.index(stage), pred=pred)


@gluon.jit
def _step(
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
def _send(out, pieces, values, begin_m, begin_n, NUMBER: gl.constexpr):
    """Store a piece of a tile, some of its columns, by TMA. Two shared-memory buffers alternate: the other may still be
    read from. A tile has an even number of pieces, so its first buffer is not the last of the tile before."""
    piece = pieces.index(NUMBER % 2)
    tma.store_wait(1)
    piece.store(values)
    fence_async_shared()
    gluon_copies.tma_store(out, [begin_m, begin_n + NUMBER * out.block_shape[1]], piece)


@gluon.jit
def _store(out, pieces, total, x_scale, scale, bias, begin_m, begin_n, BIAS: gl.constexpr):
    """Scale and store a tile. x_scale: [BLOCK_M]; scale, bias: [BLOCK_N], in any layout."""
    line: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    result = total.to(gl.float32) * gl.expand_dims(gl.convert_layout(scale, line), 0) * gl.expand_dims(x_scale, 1)
    if BIAS:
        result += gl.expand_dims(gl.convert_layout(bias, line).to(gl.float32), 0)
    left, right = halves(result.to(out.dtype))
    if 2 * out.block_shape[1] == total.shape[1]:
        _send(out, pieces, left, begin_m, begin_n, 0)
        _send(out, pieces, right, begin_m, begin_n, 1)
    else:
        values = halves(left)
        _send(out, pieces, values[0], begin_m, begin_n, 0)
        _send(out, pieces, values[1], begin_m, begin_n, 1)
        values = halves(right)
        _send(out, pieces, values[0], begin_m, begin_n, 2)
        _send(out, pieces, values[1], begin_m, begin_n, 3)


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
        _fetch_weight(x, weight, weight_stages, filled, stage, next_n, next_start, next_tile < tiles)
        next_tile, next_m, next_n, next_start = _step(
            next_tile, next_m, next_n, next_start, rows, outputs, first, end, BLOCK_K, (BLOCK_M, BLOCK_N)
        )
    wait(PDL)
    next_tile, next_m, next_n, next_start = begin
    for stage in gl.static_range(STAGES - 1):
        _fetch_x(x, x_stages, filled, stage, next_m, next_start, next_tile < tiles)
        next_tile, next_m, next_n, next_start = _step(
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
            _fetch_weight(x, weight, weight_stages, filled, free, next_n, next_start, next_tile < tiles)
            _fetch_x(x, x_stages, filled, free, next_m, next_start, next_tile < tiles)
            next_tile, next_m, next_n, next_start = _step(
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
                _store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
        else:
            _store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
    tma.store_wait(0)


@gluon.jit
def _fetch_parts(x, x_stages, filled, stage, begin_m, start, pred):
    """Start loading a stage's rows of x, those of each consumer apart."""
    for number in gl.static_range(CONSUMERS):
        part = x_stages.index(CONSUMERS * stage + number)
        gluon_copies.tma_load(x, [begin_m + number * x.block_shape[0], start], filled.index(stage), part, pred=pred)


@gluon.jit
def _load(sources, shared, place, sizes):
    """The warp that loads, from the position `place` on. Loads of the first STAGES steps have begun before."""
    x, weight = sources
    x_stages, weight_stages, filled, free = shared
    rows, outputs, inputs = sizes
    STAGES: gl.constexpr = weight_stages.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, BLOCK_N)
    tile, begin_m, begin_n, start = place
    stage = 0
    phase = 0
    while tile < tiles:
        mbarrier.wait(free.index(stage), phase)
        _fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, True, CONSUMERS)
        _fetch_parts(x, x_stages, filled, stage, begin_m, start, True)
        tile, begin_m, begin_n, start = _step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, x.block_shape[1], (BLOCK_M, BLOCK_N), STRIP
        )
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _consume(arguments, shared, pieces, sizes, NUMBER: gl.constexpr, BIAS: gl.constexpr):
    """The warpgroup that computes part NUMBER of each tile's rows."""
    out, x_scale, scale, bias = arguments
    x_stages, weight_stages, filled, free = shared
    rows, outputs, inputs = sizes
    STAGES: gl.constexpr = weight_stages.shape[0]
    PART_M: gl.constexpr = x_stages.shape[1]
    BLOCK_M: gl.constexpr = CONSUMERS * PART_M
    BLOCK_N: gl.constexpr = weight_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    INTEGER: gl.constexpr = x_stages.dtype == gl.int8
    WIDTH: gl.constexpr = min(BLOCK_N, MAX_INT8_WIDTH) if INTEGER else BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, BLOCK_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        begin_m, begin_n = place_of_tile(tile, rows, outputs, BLOCK_M, BLOCK_N, STRIP)
        begin_m += NUMBER * PART_M
        m = begin_m + gl.arange(0, PART_M, gl.SliceLayout(1, MMA))
        n = begin_n + gl.arange(0, BLOCK_N, LINE)
        row_scale = gl.load(x_scale + m, mask=m < rows, other=0.0)
        output_scale = gl.load(scale + n, mask=n < outputs, other=0.0)
        output_bias = gl.load(bias + n, mask=n < outputs, other=0.0) if BIAS else output_scale
        total = gl.zeros((PART_M, BLOCK_N), gl.int32 if INTEGER else gl.float32, MMA)
        for start in range(0, inputs, BLOCK_K):
            mbarrier.wait(filled.index(stage), phase)
            left = x_stages.index(CONSUMERS * stage + NUMBER)
            right = weight_stages.index(stage).permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total, left, right])[0]
            # The previous step is complete, so its stage is free.
            before = gl.where(stage == 0, STAGES - 1, stage - 1)
            mbarrier.arrive(free.index(before), count=1, pred=start > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        _store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _specialized_kernel(
    out, x, weight, x_scale, scale, bias, rows, outputs, inputs,
    STAGES: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `_matmul_kernel` without splits; blocks of out and x have a consumer's rows. Loads run up to STAGES steps
    ahead of the products, across tiles."""
    PART_M: gl.constexpr = x.block_shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * PART_M
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    release(PDL)
    x_stages = gl.allocate_shared_memory(x.dtype, [CONSUMERS * STAGES, PART_M, BLOCK_K], x.layout)
    weight_stages = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    first_pieces = gl.allocate_shared_memory(out.dtype, [2, PART_M, out.block_shape[1]], out.layout)
    second_pieces = gl.allocate_shared_memory(out.dtype, [2, PART_M, out.block_shape[1]], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, BLOCK_N)
    begin_m, begin_n = place_of_tile(gl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, STRIP)
    begin = (gl.program_id(0), begin_m, begin_n, 0)
    tile, begin_m, begin_n, start = begin
    for stage in gl.static_range(STAGES):  # weights, which no earlier kernel writes
        _fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, tile < tiles, CONSUMERS)
        tile, begin_m, begin_n, start = _step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, BLOCK_K, (BLOCK_M, BLOCK_N), STRIP
        )
    wait(PDL)
    tile, begin_m, begin_n, start = begin
    for stage in gl.static_range(STAGES):
        _fetch_parts(x, x_stages, filled, stage, begin_m, start, tile < tiles)
        tile, begin_m, begin_n, start = _step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, BLOCK_K, (BLOCK_M, BLOCK_N), STRIP
        )
    place = (tile, begin_m, begin_n, start)
    shared = (x_stages, weight_stages, filled, free)
    arguments = (out, x_scale, scale, bias)
    sizes = (rows, outputs, inputs)
    gl.warp_specialize(
        [
            (_consume, (arguments, shared, first_pieces, sizes, 0, BIAS)),
            (_consume, (arguments, shared, second_pieces, sizes, 1, BIAS)),
            (_load, ((x, weight), shared, place, sizes)),
        ],
        [4, 1],
        [232, 40],  # registers per thread; the first group gets the rest
    )


def is_specialized(tile: W8A8Tile) -> bool:
    """Whether a persistent tile is computed by specialized warps."""
    rows = CONSUMERS.value * CONSUMER_ROWS
    return (tile.rows, tile.outputs, tile.splits, tile.block_k) == (rows, CONSUMER_OUTPUTS, 1, 128)


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile: W8A8Tile,
    workspace: Workspace,
    *,
    compile_only: bool = False,
) -> None:
    """Write to `out`, [rows, outputs], a 16-bit dtype. The rest as in scaled_matmul.matmul, with at least one row.

    compile_only: compile without a launch, as the active triton.AsyncCompileMode says. tile: of 32 to 256 outputs.
    """
    piece = min(tile.outputs // 2, MAX_PIECE)
    layout_8_bit = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    layout_16_bit = gl.NVMMASharedLayout(swizzle_byte_width=2 * piece, element_bitwidth=16, rank=2)
    specialized = is_specialized(tile)
    part = CONSUMER_ROWS if specialized else tile.rows
    arguments: tuple[object, ...] = (
        TensorDescriptor.from_tensor(out, [part, piece], layout_16_bit),
        TensorDescriptor(x, *loaded_shape(x, tile.rows), [part, tile.block_k], layout_8_bit),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.block_k], layout_8_bit),
        x_scale,
        scale,
        scale if bias is None else bias,
    )
    partials = workspace.partials.view(torch.int32) if x.dtype == torch.int8 else workspace.partials
    sizes = (*out.shape, x.shape[1])
    constants = {"STAGES": tile.stages, "BIAS": bias is not None, **dependent_launch(x.device)}
    kernel = _specialized_kernel if specialized else _matmul_kernel
    if specialized:
        arguments += sizes
        constants["num_warps"] = 4
    else:
        arguments += (partials, workspace.arrivals, *sizes)
        constants |= {"SPLITS": tile.splits, "num_warps": tile.warps}
    if compile_only:
        kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        programs = tile.programs(*out.shape)
        if tile.splits == 1:
            programs = min(programs, num_sms(x.device))
        kernel[(programs, tile.splits)](*arguments, **constants)
