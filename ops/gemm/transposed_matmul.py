"""Persistent W8A8 GEMM that computes W x^T in Gluon, for 129 to 256 rows of x on GPUs with wgmma (Hopper).

A tile has all rows of x, so that each element of W is loaded once. Rows of W take the place that rows of x have in
persistent_matmul.py, and the sums of the first PART rows of x and of the rest are in two accumulators: 192 rows are
128 + 64, where a tile of a power of two would multiply 256. One warp loads by TMA, the others multiply.

There is at most one program per multiprocessor, and programs share tiles by Stream-K (stream_k.py).

The tiles of a gated layer have runs of 8 rows of the gate projection and the same rows of the up projection in turns.
Both numbers of an output are then in the same thread, which stores act(gate) * up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.ops.activation.act_and_mul import activate
from engine.ops.common import gluon_copies
from engine.ops.common.fast_math import round_both
from engine.ops.common.gluon_tiles import part_of_columns
from engine.ops.common.launch import release, wait
from engine.ops.gemm.stream_k import add_partials, begin_of, first_unit, unit_after, write_partial

RUN = gl.constexpr(8)
"""Rows of W of a gated layer side by side: wgmma's sums in rows that are this far apart belong to one thread."""


@gluon.jit
def _fetch_weight(sources, shared, stage, unit, blocks, BLOCK_W: gl.constexpr, GATED: gl.constexpr):
    """Start loading a stage's tile of W. The stage's barrier completes when the rows of x have arrived too."""
    x, rest, weight = sources
    _, _, weight_stages, filled, _ = shared
    barrier = filled.index(stage)
    begin = unit // blocks * BLOCK_W
    start = unit % blocks * x.block_shape[1]
    mbarrier.expect(barrier, x.block_type.nbytes + rest.block_type.nbytes + weight.block_type.nbytes)
    if GATED:
        runs = weight_stages.index(stage)._reinterpret(weight.dtype, weight.block_shape, weight.layout)
        gluon_copies.tma_load(weight, [begin // (2 * RUN), 0, 0, start], barrier, runs)
    else:
        gluon_copies.tma_load(weight, [begin, start], barrier, weight_stages.index(stage))


@gluon.jit
def _fetch_x(sources, shared, stage, unit, blocks):
    """Start loading a stage's rows of x, after its tile of W."""
    x, rest, _ = sources
    x_stages, rest_stages, _, filled, _ = shared
    start = unit % blocks * x.block_shape[1]
    gluon_copies.tma_load(x, [0, start], filled.index(stage), x_stages.index(stage))
    gluon_copies.tma_load(rest, [x.block_shape[0], start], filled.index(stage), rest_stages.index(stage))


@gluon.jit
def _load(
    sources, shared, tiles, blocks, shared_units,
    BLOCK_W: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    _, _, weight_stages, _, free = shared
    STAGES: gl.constexpr = weight_stages.shape[0]
    units = tiles * blocks
    begin = first_unit(shared_units, blocks)
    unit = begin
    for stage in gl.static_range(STAGES):  # weights, which no earlier kernel writes
        if unit < units:
            _fetch_weight(sources, shared, stage, unit, blocks, BLOCK_W, GATED)
        unit = unit_after(unit, shared_units, blocks)
    wait(PDL)
    unit = begin
    for stage in gl.static_range(STAGES):
        if unit < units:
            _fetch_x(sources, shared, stage, unit, blocks)
        unit = unit_after(unit, shared_units, blocks)
    stage = 0
    phase = 0
    while unit < units:
        mbarrier.wait(free.index(stage), phase)
        _fetch_weight(sources, shared, stage, unit, blocks, BLOCK_W, GATED)
        _fetch_x(sources, shared, stage, unit, blocks)
        unit = unit_after(unit, shared_units, blocks)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _finished(
    total, scale, bias, x_scale, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Results of rows of W, [outputs, rows of x]. scale, bias: [rows of W]; x_scale: [rows of x]; in any layout."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    # In the order of scaled_matmul.py, so that rounding is the same.
    result = total.to(gl.float32) * gl.expand_dims(gl.convert_layout(scale, OF_ROWS), 1)
    result *= gl.expand_dims(gl.convert_layout(x_scale, OF_COLUMNS), 0)
    if BIAS:
        result += gl.expand_dims(gl.convert_layout(bias, OF_ROWS).to(gl.float32), 1)
    if ACTIVATION is not None:  # of gate and up as if they were stored first
        gate, up = result.reshape((ROWS // (2 * RUN), 2, RUN, COLUMNS)).permute((0, 2, 3, 1)).split()
        gate, up = round_both(gate, up, DTYPE)
        result = activate(gate, up, ACTIVATION).reshape((ROWS // 2, COLUMNS))
    return result.to(DTYPE)


@gluon.jit
def _store(out, pieces, values, begin_m, begin_n, FIRST: gl.constexpr):
    """Store results, [outputs, rows of x], in pieces of some rows of x. FIRST: number of pieces of the tile before."""
    COUNT: gl.constexpr = values.shape[1] // out.block_shape[0]
    for number in gl.static_range(COUNT):
        piece = pieces.index((FIRST + number) % 2)
        tma.store_wait(1)  # the piece before the last has left its buffer
        piece.permute((1, 0)).store(part_of_columns(values, number, COUNT))
        fence_async_shared()
        gluon_copies.tma_store(out, [begin_m + number * out.block_shape[0], begin_n], piece)


@gluon.jit
def _multiply(
    arguments, shared, pieces, rows, weight_rows, tiles, blocks, shared_units,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply, scale and store."""
    out, x_scale, scale, bias, partials, arrivals = arguments
    x_stages, rest_stages, weight_stages, filled, free = shared
    STAGES: gl.constexpr = weight_stages.shape[0]
    BLOCK_W: gl.constexpr = weight_stages.shape[1]
    PART_M: gl.constexpr = x_stages.shape[1]
    REST_M: gl.constexpr = rest_stages.shape[1]
    INTEGER: gl.constexpr = x_stages.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGER else gl.float32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PART_M, 32])
    MMA_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST_M, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    half = weight_rows // 2
    m = gl.arange(0, PART_M, LINE)
    m_rest = PART_M + gl.arange(0, REST_M, LINE)
    lane = gl.arange(0, BLOCK_W, LINE)
    units = tiles * blocks
    range_end = begin_of(gl.program_id(0) + 1, shared_units)
    unit = first_unit(shared_units, blocks)
    wait(PDL)
    first_scale = gl.load(x_scale + m, mask=m < rows, other=0.0)
    rest_scale = gl.load(x_scale + m_rest, mask=m_rest < rows, other=0.0)
    stage = 0
    phase = 0
    while unit < units:
        first = unit % blocks
        tile_end = unit - first + blocks
        end = blocks
        if unit < range_end:
            end -= gl.maximum(tile_end - range_end, 0)
        begin_n = unit // blocks * BLOCK_W
        if ACTIVATION is not None:
            n = begin_n // 2 + lane // (2 * RUN) * RUN + lane % RUN
            valid = n < half
            n += gl.where(lane // RUN % 2 == 1, half, 0)
        else:
            n = begin_n + lane
            valid = n < weight_rows
        output_scale = gl.load(scale + n, mask=valid, other=0.0)
        output_bias = gl.load(bias + n, mask=valid, other=0.0) if BIAS else output_scale
        total = gl.zeros((BLOCK_W, PART_M), SUM, MMA)
        rest = gl.zeros((BLOCK_W, REST_M), SUM, MMA_REST)
        for block in range(first, end):
            mbarrier.wait(filled.index(stage), phase)
            left = weight_stages.index(stage)
            total = warpgroup_mma(left, x_stages.index(stage).permute((1, 0)), total, is_async=True)
            rest = warpgroup_mma(left, rest_stages.index(stage).permute((1, 0)), rest, is_async=True)
            total, rest = warpgroup_mma_wait(2, deps=[total, rest])
            # The products of the previous stage are complete, so it is free.
            before = gl.where(stage == 0, STAGES - 1, stage - 1)
            mbarrier.arrive(free.index(before), count=1, pred=block > first)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total, rest = warpgroup_mma_wait(0, deps=[total, rest])
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        if first > 0:
            write_partial((total, rest), partials, arrivals)
        else:
            if end < blocks:
                total, rest = add_partials((total, rest), partials, arrivals, tile_end, shared_units)
            tma.store_wait(0)  # the tile before has left its buffers
            begin_out = begin_n // 2 if ACTIVATION is not None else begin_n
            value = _finished(total, output_scale, output_bias, first_scale, BIAS, ACTIVATION, out.dtype)
            _store(out, pieces, value, 0, begin_out, 0)
            value = _finished(rest, output_scale, output_bias, rest_scale, BIAS, ACTIVATION, out.dtype)
            _store(out, pieces, value, PART_M, begin_out, PART_M // out.block_shape[0])
        unit = unit_after(tile_end - blocks + end - 1, shared_units, blocks)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "blocks", "shared_tiles"])
def matmul_kernel(
    out, x, rest, weight, x_scale, scale, bias, partials, arrivals, rows, weight_rows, blocks, shared_tiles,
    BLOCK_W: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out = (x W^T) * x_scale * scale + bias. Grid: programs, all of which run concurrently.

    out: a descriptor of [rows, outputs]. x, rest: descriptors of [rows, inputs], of the first rows of x and of the
    rest. weight: a descriptor of [weight_rows, inputs], or with an ACTIVATION [outputs / RUN, 2, RUN, inputs], of gate
    and up; then out = act(gate) * up. x_scale: [rows]; scale, bias: [weight_rows]. blocks: of inputs.

    The first `shared_tiles` tiles are divided among all programs, and each has an equal number of the others. partials:
    [programs, BLOCK_W * rows of a tile], float32 or int32; arrivals: [programs] int32, 0 before and after.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    release(PDL)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], x.block_shape[1]], x.layout)
    rest_stages = gl.allocate_shared_memory(rest.dtype, [STAGES, rest.block_shape[0], x.block_shape[1]], rest.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    weight_stages = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_W, x.block_shape[1]], WEIGHTS)
    pieces = gl.allocate_shared_memory(out.dtype, [2, out.block_shape[0], out.block_shape[1]], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    tiles = gl.cdiv(weight_rows, BLOCK_W)
    shared_units = shared_tiles * blocks
    shared = (x_stages, rest_stages, weight_stages, filled, free)
    arguments = (out, x_scale, scale, bias, partials, arrivals)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    arguments, shared, pieces, rows, weight_rows, tiles, blocks, shared_units,
                    BIAS, ACTIVATION, PDL,
                ),
            ),
            (_load, ((x, rest, weight), shared, tiles, blocks, shared_units, BLOCK_W, GATED, PDL)),
        ],
        [1],
        [40],  # registers per thread; the others get the rest
    )  # fmt: skip
