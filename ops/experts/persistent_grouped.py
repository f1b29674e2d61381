"""Persistent grouped GEMM in Gluon, for many rows per expert on GPUs with wgmma (Hopper).

There is one program per multiprocessor; each works through several items: a tile of rows of one expert, and a block of
outputs. Items take unequal times, so programs claim them one by one from a counter.

The warps of a program are in three groups. One group claims items, finds their places and loads: W by TMA; rows of x by
TMA, or where they are gathered by asynchronous copies. It runs ahead of the others by some stages, at the end of an
item into the next. The other groups multiply, each half of a tile's rows. Where an expert's last tile has no rows for
the second group, the first multiplies alone, at twice its speed. Between two items nothing is multiplied, so these
groups only store there, each warp on its own, and read the place of the next item from shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.activation.act_and_mul import activate
from engine.ops.common import gluon_copies
from engine.ops.common.gluon_tiles import halves, part_of_columns
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

if TYPE_CHECKING:
    from engine.ops.experts.sort import SortedPairs
    from engine.ops.experts.weights import StackedWeight

TILE_ROWS = 128
"""Rows of x per tile."""
TILE_OUTPUTS = 256
"""Rows of W per tile; half of gate and half of up where both are computed."""
STEP_BYTES = 128
"""Bytes of a row of x or W per step."""
ROW_ALIGNMENT = 16
"""Rows of x and W start at multiples of this many bytes."""
STAGES = 4
WARPS = 12
"""Warps of all three groups."""
_ROWS = gl.constexpr(TILE_ROWS)
_HALF_ROWS = gl.constexpr(TILE_ROWS // 2)
_OUTPUTS = gl.constexpr(TILE_OUTPUTS)
_HALF_OUTPUTS = gl.constexpr(TILE_OUTPUTS // 2)
_BAND = gl.constexpr(16)  # tiles of rows that are computed for a block of outputs before the next block
_SLOTS = gl.constexpr(8)  # places in shared memory; loads are at most STAGES turns ahead, and places one more
_PLACE = gl.constexpr(4)  # numbers of a place
_STORE = gl.constexpr(gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0]))
"""Of results: each warp has the 16 rows that it multiplied, so it waits for no other, and stores whole cache lines."""
_PIECE = gl.constexpr(64)  # columns that are stored at a time, a cache line of each row
_MAX_INT8_WIDTH = gl.constexpr(128)  # outputs per wgmma instruction of int8: the compiler supports no wider ones


@gluon.jit
def _place_of_item(item, items, pairs, outputs, BLOCK: gl.constexpr):
    """Expert of an item, its first row, the end of its expert's rows, and its first output.

    Consecutive items are the tiles of an expert for one block of outputs, BAND at most, then for the next block, so
    that both W and x are read from memory once and then from the L2 cache. Past the last item: expert -1, no rows.
    """
    _, tile_experts, tile_begins, tile_ends, tile_firsts = pairs
    blocks = gl.cdiv(outputs, BLOCK)
    other = item // blocks  # a tile of the same expert
    inside = item < items
    expert = gl.load(tile_experts + other, mask=inside, other=-1)
    begin = gl.load(tile_begins + other, mask=inside, other=0)
    end = gl.load(tile_ends + other, mask=inside, other=0)
    first = gl.load(tile_firsts + other, mask=inside, other=0)
    begin -= (other - first) * _ROWS
    tiles = gl.maximum(gl.cdiv(end - begin, _ROWS), 1)
    height = gl.cdiv(tiles, gl.cdiv(tiles, _BAND))
    item -= first * blocks
    band = item // (height * blocks)
    item -= band * height * blocks
    tile = band * height
    height = gl.minimum(tiles - tile, height)
    begin = gl.where(inside, begin + (tile + item % height) * _ROWS, end)
    return expert, begin, end, item // height * BLOCK


@gluon.jit
def _send_place(slots, turn, expert, begin, end, output, BLOCK: gl.constexpr):
    """Give the multiplying warps the place of the item of this program's `turn`."""
    first = turn % _SLOTS * _PLACE
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slots.index(first).store(gl.full([1], expert, gl.int32, line))
    slots.index(first + 1).store(gl.full([1], begin, gl.int32, line))
    slots.index(first + 2).store(gl.full([1], end, gl.int32, line))
    slots.index(first + 3).store(gl.full([1], output // BLOCK, gl.int32, line))


@gluon.jit
def _received(slots, number):
    """A number in shared memory."""
    return gl.max(slots.index(number).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _receive_place(slots, turn, BLOCK: gl.constexpr):
    """The place that was sent for this program's `turn`. The compiler sees that the output is a multiple of BLOCK."""
    first = turn % _SLOTS * _PLACE
    output = _received(slots, first + 3) * BLOCK
    return _received(slots, first), _received(slots, first + 1), _received(slots, first + 2), output


@gluon.jit
def _rows_of_x(pairs, begin, end, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """The tokens of a tile's rows: [TILE_ROWS]. -1: beyond the end."""
    row = begin + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    present = row < end
    pair = gl.load(pairs[0] + row, mask=present, other=0)
    return gl.where(present, pair // TOP_K, -1)


@gluon.jit
def _copy_rows(x, tokens, start, inputs, stage):
    """Copy the inputs from `start` on of the tokens' rows of x into `stage`; zeros where a token is -1."""
    layout: gl.constexpr = tokens.type.layout.parent
    column = gl.expand_dims(start + gl.arange(0, stage.shape[1], gl.SliceLayout(0, layout)), 0)
    pointers = x + gl.expand_dims(tokens.to(gl.int64) * inputs, 1) + column
    gluon_copies.load(stage, pointers, mask=gl.expand_dims(tokens >= 0, 1) & (column < inputs))


@gluon.jit
def _load(arguments, pairs, shared, items, TOP_K: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr):
    """The warps that load x and W into shared memory, and claim items for all warps and find their places."""
    x, weight, claims, inputs, outputs, matrix_rows = arguments
    x_stages, w_stages, slots, filled, free = shared
    NUM_STAGES: gl.constexpr = x_stages.shape[0]
    STEP: gl.constexpr = x_stages.shape[2]
    UNIT: gl.constexpr = 128 // x_stages.dtype.primitive_bitwidth  # values of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [gl.num_warps(), 1], [1, 0])
    BLOCK: gl.constexpr = _HALF_OUTPUTS if GATED else _OUTPUTS
    NBYTES: gl.constexpr = 2 * weight.block_type.nbytes
    second = outputs if GATED else _HALF_OUTPUTS
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    next_item = item + programs
    expert, begin, end, output = _place_of_item(item, items, pairs, outputs, BLOCK)
    if GATHER:
        tokens = _rows_of_x(pairs, begin, end, TOP_K, layout)
    step = 0
    turn = 0
    while item < items:
        next_expert, next_begin, next_end, next_output = _place_of_item(next_item, items, pairs, outputs, BLOCK)
        # Relaxed: it orders no other accesses, for which it would wait, and empty the L1 cache.
        claimed = 2 * programs + gl.atomic_add(claims, 1, sem="relaxed")
        _send_place(slots, turn + 1, next_expert, next_begin, next_end, next_output, BLOCK)
        if GATHER:
            next_tokens = _rows_of_x(pairs, next_begin, next_end, TOP_K, layout)
        matrix_row = expert * matrix_rows + output
        for start in range(0, inputs, STEP):
            stage = step % NUM_STAGES
            barrier = filled.index(stage)
            mbarrier.wait(free.index(stage), (step // NUM_STAGES & 1) ^ 1)
            w_stage = w_stages.index(stage)
            if GATHER:
                mbarrier.expect(barrier, NBYTES)
            else:
                mbarrier.expect(barrier, NBYTES + x.block_type.nbytes)
                gluon_copies.tma_load(x, [begin, start], barrier, x_stages.index(stage))
            gluon_copies.tma_load(weight, [matrix_row, start], barrier, w_stage.slice(0, _HALF_OUTPUTS))
            upper = w_stage.slice(_HALF_OUTPUTS, _HALF_OUTPUTS)
            gluon_copies.tma_load(weight, [matrix_row + second, start], barrier, upper)
            if GATHER:
                _copy_rows(x, tokens, start, inputs, x_stages.index(stage))
                async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1
        item, next_item = next_item, claimed
        expert, begin, output = next_expert, next_begin, next_output
        if GATHER:
            tokens = next_tokens
        turn += 1
    if gl.atomic_add(claims + 1, 1, sem="relaxed") == programs - 1:  # all programs have ended
        gl.store(claims, 0)
        gl.store(claims + 1, 0)


@gluon.jit
def _finish(total, scale, row_scale, bias, SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr):
    """The sums in float32, scaled, with the bias. scale, bias: [columns], in any layout; row_scale: [rows]."""
    columns: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    total = total.to(gl.float32)
    if SCALES:
        total *= gl.expand_dims(gl.convert_layout(scale, columns), 0)
    if X_SCALES:
        total *= gl.expand_dims(gl.convert_layout(row_scale, gl.SliceLayout(1, total.type.layout)), 1)
    if BIAS:
        total += gl.expand_dims(gl.convert_layout(bias, columns).to(gl.float32), 0)
    return total


@gluon.jit
def _store(out, values, target, column, outputs):
    """Store [HALF_ROWS, columns]; target: rows of `out`, -1 for none."""
    values = gl.convert_layout(values.to(out.dtype.element_ty), _STORE)
    column += gl.arange(0, values.shape[1], gl.SliceLayout(0, _STORE))
    place = gl.expand_dims(target.to(gl.int64) * outputs, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(target >= 0, 1) & gl.expand_dims(column < outputs, 0)
    gl.store(out + place, values, mask=mask)


@gluon.jit
def _multiply(
    arguments, pairs, shared, items, HALF: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, ACTIVATION: gl.constexpr, SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, x_scales, scales, bias, inputs, outputs, matrix_rows = arguments
    x_stages, w_stages, slots, filled, free = shared
    NUM_STAGES: gl.constexpr = x_stages.shape[0]
    STEP: gl.constexpr = x_stages.shape[2]
    INTEGER: gl.constexpr = x_stages.dtype == gl.int8
    GATED: gl.constexpr = ACTIVATION >= 0
    BLOCK: gl.constexpr = _HALF_OUTPUTS if GATED else _OUTPUTS
    WIDTH: gl.constexpr = _MAX_INT8_WIDTH if INTEGER else _OUTPUTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // x_stages.dtype.primitive_bitwidth]
    )
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    second = outputs if GATED else _HALF_OUTPUTS
    steps = gl.cdiv(inputs, STEP)
    expert, begin, end, output = _place_of_item(gl.program_id(0), items, pairs, outputs, BLOCK)
    step = 0
    turn = 0
    while expert >= 0:
        begin += HALF * _HALF_ROWS
        if begin < end:
            # Loaded now, so that they have arrived when the sums are complete.
            target = begin + gl.arange(0, _HALF_ROWS, gl.SliceLayout(1, _STORE))
            target = gl.where(target < end, target, -1)
            if SCATTER:
                target = gl.load(pairs[0] + target, mask=target >= 0, other=-1)
            n = output + gl.arange(0, _HALF_OUTPUTS, LINE)
            first_n = expert * matrix_rows + n
            valid = n < outputs
            second_valid = valid if GATED else n + _HALF_OUTPUTS < outputs
            first_scale = gl.load(scales + first_n, mask=valid, other=0.0) if SCALES else 0.0
            second_scale = gl.load(scales + first_n + second, mask=second_valid, other=0.0) if SCALES else 0.0
            first_bias = gl.load(bias + first_n, mask=valid, other=0.0) if BIAS else 0.0
            second_bias = gl.load(bias + first_n + second, mask=second_valid, other=0.0) if BIAS else 0.0
            row_scale = 0.0
            if X_SCALES:
                row = begin + gl.arange(0, _HALF_ROWS, gl.SliceLayout(1, MMA))
                present = row < end
                if GATHER:
                    row = gl.load(pairs[0] + row, mask=present, other=0) // TOP_K
                row_scale = gl.load(x_scales + row, mask=present, other=0.0)
            acc = gl.zeros([_HALF_ROWS, _OUTPUTS], gl.int32 if INTEGER else gl.float32, MMA)
            for number in range(steps):
                stage = step % NUM_STAGES
                mbarrier.wait(filled.index(stage), step // NUM_STAGES & 1)
                if GATHER:
                    fence_async_shared()
                x = x_stages.index(stage).slice(HALF * _HALF_ROWS, _HALF_ROWS)
                acc = warpgroup_mma(x, w_stages.index(stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                # The previous step is complete, so its stage is free.
                mbarrier.arrive(free.index((step + NUM_STAGES - 1) % NUM_STAGES), count=1, pred=number > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((step + NUM_STAGES - 1) % NUM_STAGES), count=1)
            left, right = halves(acc)
            left = _finish(left, first_scale, row_scale, first_bias, SCALES, X_SCALES, BIAS)
            right = _finish(right, second_scale, row_scale, second_bias, SCALES, X_SCALES, BIAS)
            for number in gl.static_range(_HALF_OUTPUTS // _PIECE):
                of_left = part_of_columns(left, number, _HALF_OUTPUTS // _PIECE)
                of_right = part_of_columns(right, number, _HALF_OUTPUTS // _PIECE)
                column = output + number * _PIECE
                if GATED:
                    _store(out, activate(of_left, of_right, ACTIVATION), target, column, outputs)
                else:
                    _store(out, of_left, target, column, outputs)
                    _store(out, of_right, target, column + _HALF_OUTPUTS, outputs)
        else:
            for _ in range(steps):
                stage = step % NUM_STAGES
                mbarrier.wait(filled.index(stage), step // NUM_STAGES & 1)
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
        turn += 1
        # Visible: it was stored before the steps of the turn before, which have been awaited, were loaded.
        expert, begin, end, output = _receive_place(slots, turn, BLOCK)


@gluon.jit
def _grouped_kernel(
    out, x, x_scales, weight, scales, bias, order, tile_experts, tile_begins, tile_ends, tile_firsts, used_tiles,
    claims, inputs, outputs, matrix_rows, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr,
    NUM_STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: programs, at most one per item.

    x: a pointer to [tokens, inputs] with GATHER, else a descriptor of [pairs, inputs]; weight: a descriptor of
    [experts * matrix_rows, inputs]. used_tiles, claims: as in SortedPairs. scales, bias: [experts, matrix_rows];
    x_scales: [rows of x]. The rest as in grouped_matmul._grouped_kernel.
    """
    GATED: gl.constexpr = ACTIVATION >= 0
    BLOCK: gl.constexpr = _HALF_OUTPUTS if GATED else _OUTPUTS
    STEP: gl.constexpr = weight.block_shape[1]
    x_stages = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES, _ROWS, STEP], weight.layout)
    w_stages = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES, _OUTPUTS, STEP], weight.layout)
    slots = gl.allocate_shared_memory(gl.int32, [_SLOTS * _PLACE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    # Each copying thread arrives when its copies are complete; of a multiplying group, one thread arrives for all.
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(filled.index(stage), count=129 if GATHER else 1)
        mbarrier.init(free.index(stage), count=2)
    shared = (x_stages, w_stages, slots, filled, free)
    pairs = (order, tile_experts, tile_begins, tile_ends, tile_firsts)
    wait(PDL)
    items = gl.load(used_tiles) * gl.cdiv(outputs, BLOCK)
    loaded = (x, weight, claims, inputs, outputs, matrix_rows)
    multiplied = (out, x_scales, scales, bias, inputs, outputs, matrix_rows)
    gl.warp_specialize(
        [
            (
                _multiply,
                (multiplied, pairs, shared, items, 0, TOP_K, GATHER, SCATTER, ACTIVATION, SCALES, X_SCALES, BIAS),
            ),
            (
                _multiply,
                (multiplied, pairs, shared, items, 1, TOP_K, GATHER, SCATTER, ACTIVATION, SCALES, X_SCALES, BIAS),
            ),
            (_load, (loaded, pairs, shared, items, TOP_K, GATHER, GATED)),
        ],
        [4, 4],
        [216, 80] if GATHER else [224, 56],  # registers per thread; the first group gets the rest, 208 or 224
    )
    release(PDL)  # late, as a long kernel: see ops/common/launch.py


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedWeight,
    pairs: SortedPairs,
    *,
    top_k: int,
    gather: bool,
    scatter: bool,
    activation: int,
    bias: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    compile_only: bool = False,
) -> None:
    """Write to `out`, [pairs, outputs], of a 16-bit dtype. The rest as in grouped_matmul, with at least one row.

    x and weight: of one dtype, with rows of a multiple of 16 bytes; 8-bit values have scales per row and per channel.
    pairs: sorted into tiles of TILE_ROWS. activation: NO_ACTIVATION or the value of one of ACTIVATIONS.
    """
    values = weight.values
    step = STEP_BYTES // values.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=STEP_BYTES, element_bitwidth=8 * values.itemsize, rank=2)
    scales = values if weight.scales is None else weight.scales
    arguments = (
        out,
        x if gather else TensorDescriptor.from_tensor(x, [TILE_ROWS, step], layout),
        x if x_scales is None else x_scales,
        TensorDescriptor.from_tensor(values.view(-1, values.shape[2]), [TILE_OUTPUTS // 2, step], layout),
        scales,
        scales if bias is None else bias,
        pairs.order,
        pairs.tile_experts,
        pairs.tile_begins,
        pairs.tile_ends,
        pairs.tile_firsts,
        pairs.used_tiles,
        pairs.claims,
        x.shape[1],
        out.shape[1],
        values.shape[1],
    )
    constants = {
        "TOP_K": top_k,
        "GATHER": gather,
        "SCATTER": scatter,
        "ACTIVATION": activation,
        "SCALES": weight.scales is not None,
        "X_SCALES": x_scales is not None,
        "BIAS": bias is not None,
        "NUM_STAGES": STAGES,
        "num_warps": 4,
        **dependent_launch(x.device),
    }
    if compile_only:
        _grouped_kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        items = len(pairs.tile_experts) * -(-values.shape[1] // TILE_OUTPUTS)
        _grouped_kernel[(min(items, num_sms(x.device)),)](*arguments, **constants)
