"""W4A16 GEMM with specialized warps in Gluon, for 17 to 256 rows on GPUs with wgmma (Hopper).

As in persistent_w4a16.py, the kernel computes tiles of W x^T from weights that are unpacked in registers. Here one warp
loads by TMA, and eight unpack and multiply. They hold the sums of one or two parts of PART rows of W, and unpack the
weights of one product while another is computed; unpacking takes fewer instructions (w4a16_fields.py). Tiles of 160 and
192 rows of x have the sums of the first 128 and of the rest apart, as tensors have a power of two of columns.

There is at most one program per multiprocessor. Programs share tiles by Stream-K (stream_k.py), or a fixed number of
programs divide the inputs of each tile (split_k_exchange.py): then each adds up the sums of a share of the tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from engine.ops.activation.act_and_mul import activate
from engine.ops.common import gluon_copies
from engine.ops.common.gluon_tiles import part_of_columns
from engine.ops.common.launch import release, wait
from engine.ops.gemm.persistent_w4a16 import FIELDS, RUN, SPAN, place_of_unit, row_of_lane, units_of
from engine.ops.gemm.skinny import GATED
from engine.ops.gemm.split_k_exchange import receive_sums, send_sums
from engine.ops.gemm.stream_k import add_partials, begin_of, first_unit, shared_units_of, unit_after, write_partial
from engine.ops.gemm.w4a16_fields import EXPONENT, lowered, weights_of
from engine.ops.gemm.w4a16_parts import (
    PART,
    entries_of_parts,
    multiplied,
    rows_of_parts,
    settled,
    words_of_parts,
    zeros_of_parts,
)


@gluon.jit
def _load_words(packed, word_stages, filled, slot, place, weight_rows, PARTS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Start loading the words of a unit into a free slot."""
    barrier = filled.index(slot)
    block, _, begin_n = place
    mbarrier.expect(barrier, PARTS * packed.block_type.nbytes)
    for part in gl.static_range(PARTS):
        words = word_stages.index(slot * PARTS + part)
        begin = begin_n + part * PART
        if EPILOGUE >= GATED:
            runs = words._reinterpret(words.dtype, packed.block_shape, packed.layout)
            gluon_copies.tma_load(packed, [block, begin // (2 * RUN), 0, 0, 0], barrier, runs)
        else:
            gluon_copies.tma_load(packed, [block * weight_rows + begin, 0], barrier, words)


@gluon.jit
def _load(
    sources,
    buffers,
    sizes,
    shared_units,
    REST: gl.constexpr,
    PARTS: gl.constexpr,
    STEPS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that loads: words up to a slot less than there are ahead of x, and x as far ahead as stages are free."""
    x, rest, packed = sources
    x_stages, rest_stages, word_stages, x_filled, x_free, words_filled, words_free = buffers
    _, weight_rows, blocks = sizes
    BLOCK_M: gl.constexpr = x.block_shape[0] + REST
    REST_BYTES: gl.constexpr = rest.block_type.nbytes if REST else 0
    BLOCK_N: gl.constexpr = PARTS * PART
    WIDTH: gl.constexpr = FIELDS // STEPS
    STAGES: gl.constexpr = x_filled.shape[0]
    SLOTS: gl.constexpr = words_filled.shape[0]
    units = units_of(sizes, BLOCK_M, BLOCK_N)
    unit = first_unit(shared_units, blocks)
    ahead = unit
    for slot in gl.static_range(SLOTS - 1):  # weights, which no earlier kernel writes
        if ahead < units:
            place = place_of_unit(ahead, sizes, BLOCK_M, BLOCK_N)
            _load_words(packed, word_stages, words_filled, slot, place, weight_rows, PARTS, EPILOGUE)
        ahead = unit_after(ahead, shared_units, blocks)
    wait(PDL)
    slot = SLOTS - 1
    slot_phase = 1  # nothing to wait for the first time
    stage = 0
    phase = 1
    while unit < units:
        block, begin_m, _ = place_of_unit(unit, sizes, BLOCK_M, BLOCK_N)
        for step in gl.static_range(STEPS):
            barrier = x_filled.index(stage)
            mbarrier.wait(x_free.index(stage), phase)
            mbarrier.expect(barrier, WIDTH * (x.block_type.nbytes + REST_BYTES))
            for number in gl.static_range(WIDTH):
                start = (block * FIELDS + step * WIDTH + number) * SPAN
                gluon_copies.tma_load(x, [begin_m, start], barrier, x_stages.index(stage * WIDTH + number))
                if REST:
                    begin_rest = begin_m + x.block_shape[0]
                    target = rest_stages.index(stage * WIDTH + number)
                    gluon_copies.tma_load(rest, [begin_rest, start], barrier, target)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if ahead < units:
            mbarrier.wait(words_free.index(slot), slot_phase)
            place = place_of_unit(ahead, sizes, BLOCK_M, BLOCK_N)
            _load_words(packed, word_stages, words_filled, slot, place, weight_rows, PARTS, EPILOGUE)
        ahead = unit_after(ahead, shared_units, blocks)
        slot += 1
        if slot == SLOTS:
            slot = 0
            slot_phase ^= 1
        unit = unit_after(unit, shared_units, blocks)


@gluon.jit
def _finished(
    total, bias, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, DTYPE: gl.constexpr, ZERO_POINTS: gl.constexpr
):  # fmt: skip
    """Results of rows of W: [outputs, rows of x]. total: [rows of W, rows of x] float32. bias: [rows of W]."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    if lowered(DTYPE, ZERO_POINTS):
        total *= 2.0**EXPONENT
    if BIAS:
        line: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total += gl.expand_dims(gl.convert_layout(bias, line).to(gl.float32), 1)
    if EPILOGUE >= GATED:
        gate, up = total.reshape((ROWS // (2 * RUN), 2, RUN, COLUMNS)).permute((0, 2, 3, 1)).split()
        value = activate(gate, up, EPILOGUE - GATED).reshape((ROWS // 2, COLUMNS))
    else:
        value = total
    return value.to(DTYPE)


@gluon.jit
def _store_share(out, value, begin_m, begin_output, rows, outputs):
    """Store results of a share of a tile. out: a pointer. value: [outputs, rows of x]."""
    COUNT: gl.constexpr = value.shape[0]
    ACROSS: gl.constexpr = min(COUNT // 4, 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [ACROSS, 32 // ACROSS], [1, gl.num_warps()], [0, 1])
    value = gl.convert_layout(value, LAYOUT)
    n = begin_output + gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)), 1)
    m = begin_m + gl.expand_dims(gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out + m.to(gl.int64) * outputs + n, value, mask=(n < outputs) & (m < rows))


@gluon.jit
def _multiply(
    out,
    tensors,
    buffers,
    result,
    sizes,
    shared_units,
    REST: gl.constexpr,
    PARTS: gl.constexpr,
    STEPS: gl.constexpr,
    PENDING: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warps that unpack, multiply and store."""
    scales, bias, partials, arrivals = tensors
    x_stages, rest_stages, word_stages, x_filled, x_free, words_filled, words_free = buffers
    rows, weight_rows, blocks = sizes
    outputs = weight_rows // 2 if EPILOGUE >= GATED else weight_rows
    OUT_M: gl.constexpr = result.shape[1]
    DTYPE: gl.constexpr = x_stages.dtype
    PART_M: gl.constexpr = x_stages.shape[1]
    BLOCK_M: gl.constexpr = PART_M + REST
    BLOCK_N: gl.constexpr = PARTS * PART
    WIDTH: gl.constexpr = FIELDS // STEPS
    STAGES: gl.constexpr = x_filled.shape[0]
    SLOTS: gl.constexpr = words_filled.shape[0]
    ENTRIES: gl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PART_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    MMA_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST if REST else 8, 16])
    LEFT_REST: gl.constexpr = gl.DotOperandLayout(0, MMA_REST, 2)
    units = units_of(sizes, BLOCK_M, BLOCK_N)
    range_end = begin_of(gl.program_id(0) + 1, shared_units)
    unit = first_unit(shared_units, blocks)
    lane = gl.arange(0, PART, gl.SliceLayout(1, LEFT))
    slot = 0
    slot_phase = 0
    stage = 0
    phase = 0
    while unit < units:
        first, begin_m, begin_n = place_of_unit(unit, sizes, BLOCK_M, BLOCK_N)
        tile_end = unit - first + blocks
        end = blocks
        if unit < range_end:
            end -= gl.maximum(tile_end - range_end, 0)
        row = rows_of_parts(begin_n, lane, weight_rows, PARTS, EPILOGUE)
        entries = entries_of_parts(scales, first, row, weight_rows, ENTRIES)
        totals = zeros_of_parts(PARTS, PART_M, MMA)
        if REST:
            totals = (totals[0], gl.zeros((PART, REST), gl.float32, MMA_REST))
        for block in range(first, end):
            current = entries
            entries = entries_of_parts(scales, gl.minimum(block + 1, blocks - 1), row, weight_rows, ENTRIES)
            mbarrier.wait(words_filled.index(slot), slot_phase)
            words = words_of_parts(word_stages, slot, PARTS, LEFT)
            for field in gl.static_range(FIELDS):
                if field % WIDTH == 0:
                    mbarrier.wait(x_filled.index(stage), phase)
                right = x_stages.index(stage * WIDTH + field % WIDTH).permute((1, 0))
                for part in gl.static_range(PARTS):
                    weight = weights_of(
                        words[part], current[part], field, GROUPS, SCALE_DTYPE, DTYPE, POWER, ZERO_POINTS
                    )
                    totals = multiplied(weight, right, totals, part)
                    if REST:
                        right = rest_stages.index(stage * WIDTH + field % WIDTH).permute((1, 0))
                        totals = multiplied(gl.convert_layout(weight, LEFT_REST), right, totals, 1)
                    if (field * PARTS + part) % PENDING == PENDING - 1:
                        totals = settled(totals, PENDING, 2 if REST else 1)
                    if field == 1 and part == PARTS - 1:  # all words have been read
                        mbarrier.arrive(words_free.index(slot), count=1)
                    if field % WIDTH * PARTS + part == PENDING - 1:  # the products of the previous stage are complete
                        before = gl.where(stage == 0, STAGES - 1, stage - 1)
                        mbarrier.arrive(x_free.index(before), count=1, pred=(block > first) | (field >= WIDTH))
                if field % WIDTH == WIDTH - 1:
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
            slot += 1
            if slot == SLOTS:
                slot = 0
                slot_phase ^= 1
        totals = settled(totals, 0)
        mbarrier.arrive(x_free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        wait(PDL)  # before the first write
        if SPLITS > 1:
            send_sums(totals, partials)
            total = receive_sums(partials, BLOCK_N, BLOCK_M, SPLITS)
            begin_n += gl.program_id(0) % SPLITS * (BLOCK_N // SPLITS)
            share = gl.arange(0, BLOCK_N // SPLITS, gl.SliceLayout(1, LEFT))
            share_row = row_of_lane(begin_n, share, weight_rows, EPILOGUE)
            share_bias = gl.load(bias + share_row) if BIAS else share_row
            value = _finished(total, share_bias, EPILOGUE, BIAS, DTYPE, ZERO_POINTS)
            _store_share(out, value, begin_m, begin_n // 2 if EPILOGUE >= GATED else begin_n, rows, outputs)
        elif first > 0:
            write_partial(totals, partials, arrivals)
        else:
            if end < blocks:
                totals = add_partials(totals, partials, arrivals, tile_end, shared_units)
            tma.store_wait(0)  # the previous tile has left `result`
            if REST:
                row_bias = gl.load(bias + row[0]) if BIAS else row[0]
                value = _finished(totals[0], row_bias, EPILOGUE, BIAS, DTYPE, ZERO_POINTS)
                rest_value = _finished(totals[1], row_bias, EPILOGUE, BIAS, DTYPE, ZERO_POINTS)
                begin_output = begin_n // 2 if EPILOGUE >= GATED else begin_n
                for piece in gl.static_range(PART_M // OUT_M):
                    result.index(piece).permute((1, 0)).store(part_of_columns(value, piece, PART_M // OUT_M))
                for piece in gl.static_range(REST // OUT_M):
                    target = result.index(PART_M // OUT_M + piece)
                    target.permute((1, 0)).store(part_of_columns(rest_value, piece, REST // OUT_M))
                fence_async_shared()
                for piece in gl.static_range(BLOCK_M // OUT_M):
                    gluon_copies.tma_store(out, [begin_m + piece * OUT_M, begin_output], result.index(piece))
            for part in gl.static_range(0 if REST else PARTS):
                row_bias = gl.load(bias + row[part]) if BIAS else row[part]
                value = _finished(totals[part], row_bias, EPILOGUE, BIAS, DTYPE, ZERO_POINTS)
                result.index(part).permute((1, 0)).store(value)
                fence_async_shared()
                begin = begin_n + part * PART
                begin_output = begin // 2 if EPILOGUE >= GATED else begin
                gluon_copies.tma_store(out, [begin_m, begin_output], result.index(part))
        unit = unit_after(tile_end - blocks + end - 1, shared_units, blocks)
    if SPLITS <= 1:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "blocks"])  # Triton 3.6 cannot compile it with `blocks` the constant 1
def matmul_kernel(
    out,
    x,
    rest,
    packed,
    scales,
    bias,
    partials,
    arrivals,
    rows,
    weight_rows,
    blocks,
    PARTS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    PENDING: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: programs, at most one per multiprocessor.

    x: a descriptor of [rows, inputs]. rest: the same for the rows of a tile beyond x's, of which a part of W then has
    sums of their own, and `out` has blocks of as many rows; None: a tile has x's rows only. packed: of a part of a
    GroupedLayout's words, gated of [blocks, outputs / RUN, 2, RUN, SPAN], else of [blocks * outputs, SPAN]. scales:
    [blocks, entries, weight_rows] int32, see GroupedLayout; GROUPS: groups per block. PARTS: parts of PART rows of W
    per tile. STEPS: stages of x per block. STAGES: stages of x in shared memory. SLOTS: blocks of words there. PENDING:
    products in flight while others' weights are unpacked; they divide those of a stage. POWER: see GroupedLayout.power.
    SPLITS up to 1: tiles are shared by Stream-K, by any number of programs. out: a descriptor of [rows, outputs], with
    blocks of a part. partials, arrivals: see stream_k.py. With more SPLITS, that many programs divide the inputs of
    each tile; out: a pointer; partials: see split_k_exchange.py.
    """
    PART_M: gl.constexpr = x.block_shape[0]
    REST: gl.constexpr = 0 if rest is None else rest.block_shape[0]
    BLOCK_M: gl.constexpr = PART_M + REST
    WIDTH: gl.constexpr = FIELDS // STEPS
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    release(PDL)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES * WIDTH, PART_M, SPAN], x.layout)
    if REST:
        rest_of_x = rest
        rest_stages = gl.allocate_shared_memory(x.dtype, [STAGES * WIDTH, REST, SPAN], rest.layout)
    else:  # not used
        rest_of_x = x
        rest_stages = x_stages
    word_stages = gl.allocate_shared_memory(gl.int16, [SLOTS * PARTS, PART, SPAN], WORDS)
    if SPLITS > 1:
        result = x_stages  # not used
    else:
        COUNT: gl.constexpr = BLOCK_M // out.block_shape[0] if REST else PARTS
        result = gl.allocate_shared_memory(out.dtype, [COUNT, out.block_shape[0], out.block_shape[1]], out.layout)
    x_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    words_filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    words_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_filled.index(stage), count=1)
        mbarrier.init(x_free.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(words_filled.index(slot), count=1)
        mbarrier.init(words_free.index(slot), count=1)
    buffers = (x_stages, rest_stages, word_stages, x_filled, x_free, words_filled, words_free)
    sizes = (rows, weight_rows, blocks)
    shared_units = shared_units_of(units_of(sizes, BLOCK_M, PARTS * PART) // blocks, blocks)
    tensors = (scales, bias, partials, arrivals)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, tensors, buffers, result, sizes, shared_units, REST, PARTS, STEPS, PENDING, SPLITS, GROUPS,
                    SCALE_DTYPE, POWER, ZERO_POINTS, EPILOGUE, BIAS, PDL,
                ),
            ),
            (_load, ((x, rest_of_x, packed), buffers, sizes, shared_units, REST, PARTS, STEPS, EPILOGUE, PDL)),
        ],
        [1],
        [40],  # registers per thread; the others get the rest
    )  # fmt: skip
