"""Persistent W8A8 GEMM with specialized warps in Gluon, for prefill by large tiles on GPUs with wgmma (Hopper).

As in persistent_matmul.py there is one program per multiprocessor, but one of its warps loads, and two warpgroups each
multiply, scale and store one half of a tile's rows. They share only the stages of inputs: one multiplies while the
other stores.

The tiles of a gated layer have rows of the gate projection and the same rows of the up projection as the left and the
right half of their outputs. Both are then in the same thread, which stores act(gate) * up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.activation.act_and_mul import ACTIVATIONS, activate
from engine.ops.common import gluon_copies
from engine.ops.common.fast_math import round_both
from engine.ops.common.gluon_tiles import halves
from engine.ops.common.launch import dependent_launch, num_sms, release, wait
from engine.ops.gemm.persistent_matmul import (
    MAX_INT8_WIDTH,
    MAX_PIECE,
    fetch_weight,
    scaled,
    send,
    step,
    store,
)
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.tile_order import loaded_shape, place_of_tile

if TYPE_CHECKING:
    from engine.ops.gemm.scaled_matmul import W8A8Tile

STRIP = gl.constexpr(16)
"""As tile_order.SWIZZLE, for tiles with specialized warps: W is read from memory half as often."""
CONSUMERS = gl.constexpr(2)
"""Warpgroups that multiply, where warps are specialized."""
CONSUMER_ROWS = 64
"""Rows of x per such warpgroup."""
CONSUMER_OUTPUTS = 256
"""Outputs of a tile whose warps are specialized."""


@gluon.jit
def _fetch_gate_and_up(x, weight, weight_stages, filled, stage, begin_n, outputs, start, pred, PARTS: gl.constexpr):
    """As `fetch_weight`, of a gated layer: rows of the gate projection, and the same of the up projection after it."""
    barrier = filled.index(stage)
    mbarrier.expect(barrier, PARTS * x.block_type.nbytes + 2 * weight.block_type.nbytes, pred=pred)
    shape: gl.constexpr = [2, weight.block_shape[0], weight.block_shape[1]]
    gate_and_up = weight_stages.index(stage)._reinterpret(weight.dtype, shape, weight.layout)
    gluon_copies.tma_load(weight, [begin_n, start], barrier, gate_and_up.index(0), pred=pred)
    gluon_copies.tma_load(weight, [outputs + begin_n, start], barrier, gate_and_up.index(1), pred=pred)


@gluon.jit
def _store_gated(
    out, pieces, total, x_scale, scale, bias, begin_m, begin_n, BIAS: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Scale, activate and store a tile of a gated layer. Gate and up are rounded first, as if they were stored."""
    gate, up = halves(scaled(total, x_scale, scale, bias, BIAS))
    gate, up = round_both(gate, up, out.dtype)
    left, right = halves(activate(gate, up, ACTIVATION).to(out.dtype))
    send(out, pieces, left, begin_m, begin_n, 0)
    send(out, pieces, right, begin_m, begin_n, 1)


@gluon.jit
def _fetch_parts(x, x_stages, filled, stage, begin_m, start, pred):
    """Start loading a stage's rows of x, those of each consumer apart."""
    for number in gl.static_range(CONSUMERS):
        part = x_stages.index(CONSUMERS * stage + number)
        gluon_copies.tma_load(x, [begin_m + number * x.block_shape[0], start], filled.index(stage), part, pred=pred)


@gluon.jit
def _load(sources, shared, place, sizes, GATED: gl.constexpr):
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
        if GATED:
            _fetch_gate_and_up(x, weight, weight_stages, filled, stage, begin_n, outputs, start, True, CONSUMERS)
        else:
            fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, True, CONSUMERS)
        _fetch_parts(x, x_stages, filled, stage, begin_m, start, True)
        tile, begin_m, begin_n, start = step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, x.block_shape[1], (BLOCK_M, BLOCK_N), STRIP
        )
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _consume(
    arguments, shared, pieces, sizes, NUMBER: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The warpgroup that computes part NUMBER of each tile's rows."""
    out, x_scale, scale, bias = arguments
    x_stages, weight_stages, filled, free = shared
    rows, outputs, inputs = sizes
    STAGES: gl.constexpr = weight_stages.shape[0]
    PART_M: gl.constexpr = x_stages.shape[1]
    BLOCK_M: gl.constexpr = CONSUMERS * PART_M
    WEIGHT_N: gl.constexpr = weight_stages.shape[1]
    GATED: gl.constexpr = ACTIVATION is not None
    BLOCK_N: gl.constexpr = WEIGHT_N // 2 if GATED else WEIGHT_N
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    INTEGER: gl.constexpr = x_stages.dtype == gl.int8
    WIDTH: gl.constexpr = min(WEIGHT_N, MAX_INT8_WIDTH) if INTEGER else WEIGHT_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, BLOCK_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        begin_m, begin_n = place_of_tile(tile, rows, outputs, BLOCK_M, BLOCK_N, STRIP)
        begin_m += NUMBER * PART_M
        m = begin_m + gl.arange(0, PART_M, gl.SliceLayout(1, MMA))
        n = begin_n + gl.arange(0, WEIGHT_N, LINE)
        row_scale = gl.load(x_scale + m, mask=m < rows, other=0.0)
        valid = n < outputs
        if GATED:  # the right half is of the up projection
            is_up = n >= begin_n + BLOCK_N
            valid = gl.where(is_up, n - BLOCK_N, n) < outputs
            n += gl.where(is_up, outputs - BLOCK_N, 0)
        output_scale = gl.load(scale + n, mask=valid, other=0.0)
        output_bias = gl.load(bias + n, mask=valid, other=0.0) if BIAS else output_scale
        total = gl.zeros((PART_M, WEIGHT_N), gl.int32 if INTEGER else gl.float32, MMA)
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
        if GATED:
            _store_gated(
                out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS, ACTIVATION
            )  # fmt: skip
        else:
            store(out, pieces, total, row_scale, output_scale, output_bias, begin_m, begin_n, BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _specialized_kernel(
    out, x, weight, x_scale, scale, bias, rows, outputs, inputs,
    STAGES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As persistent_matmul._matmul_kernel without splits; blocks of out and x have a consumer's rows. Loads run up to
    STAGES steps ahead of the products, across tiles.

    ACTIVATION: of a gated layer, else None. With one, out = act(gate) * up, W has `outputs` rows of the gate projection
    and then as many of the up projection, and a block of W has half a tile's outputs.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    PART_M: gl.constexpr = x.block_shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * PART_M
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    release(PDL)
    x_stages = gl.allocate_shared_memory(x.dtype, [CONSUMERS * STAGES, PART_M, BLOCK_K], x.layout)
    WEIGHT_N: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    weight_stages = gl.allocate_shared_memory(weight.dtype, [STAGES, WEIGHT_N, BLOCK_K], weight.layout)
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
        if GATED:
            _fetch_gate_and_up(
                x, weight, weight_stages, filled, stage, begin_n, outputs, start, tile < tiles, CONSUMERS
            )  # fmt: skip
        else:
            fetch_weight(x, weight, weight_stages, filled, stage, begin_n, start, tile < tiles, CONSUMERS)
        tile, begin_m, begin_n, start = step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, BLOCK_K, (BLOCK_M, BLOCK_N), STRIP
        )
    wait(PDL)
    tile, begin_m, begin_n, start = begin
    for stage in gl.static_range(STAGES):
        _fetch_parts(x, x_stages, filled, stage, begin_m, start, tile < tiles)
        tile, begin_m, begin_n, start = step(
            tile, begin_m, begin_n, start, rows, outputs, 0, inputs, BLOCK_K, (BLOCK_M, BLOCK_N), STRIP
        )
    place = (tile, begin_m, begin_n, start)
    shared = (x_stages, weight_stages, filled, free)
    arguments = (out, x_scale, scale, bias)
    sizes = (rows, outputs, inputs)
    gl.warp_specialize(
        [
            (_consume, (arguments, shared, first_pieces, sizes, 0, BIAS, ACTIVATION)),
            (_consume, (arguments, shared, second_pieces, sizes, 1, BIAS, ACTIVATION)),
            (_load, ((x, weight), shared, place, sizes, GATED)),
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
    operands: ScaledOperands,
    tile: W8A8Tile,
    *,
    activation: str | None = None,
    compile_only: bool = False,
) -> None:
    """As persistent_matmul.launch, for a tile that `is_specialized`.

    activation: one of act_and_mul.ACTIVATIONS. `out` then has half as many columns as W has rows: act(gate) * up, where
    the first half of the rows of W is of the gate. None: `out` has all outputs.
    """
    assert is_specialized(tile), f"{tile} has no specialized warps"
    x = operands.x
    layout_8_bit = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    layout_16_bit = gl.NVMMASharedLayout(swizzle_byte_width=2 * MAX_PIECE, element_bitwidth=16, rank=2)
    columns = tile.outputs if activation is None else tile.outputs // 2
    arguments = (
        TensorDescriptor.from_tensor(out, [CONSUMER_ROWS, MAX_PIECE], layout_16_bit),
        TensorDescriptor(x, *loaded_shape(x, tile.rows), [CONSUMER_ROWS, tile.block_k], layout_8_bit),
        TensorDescriptor.from_tensor(operands.weight, [columns, tile.block_k], layout_8_bit),
        *operands.scales_and_bias,
        *out.shape,
        x.shape[1],
    )
    constants = {
        "STAGES": tile.stages,
        "BIAS": operands.bias is not None,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation].value,
        "num_warps": 4,
        **dependent_launch(x.device),
    }
    if compile_only:
        _specialized_kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        tiles = tile.programs(x.shape[0], operands.weight.shape[0])
        _specialized_kernel[(min(tiles, num_sms(x.device)),)](*arguments, **constants)
