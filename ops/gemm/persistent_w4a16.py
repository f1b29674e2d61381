"""Persistent W4A16 GEMM in Gluon, for many rows on GPUs with wgmma (Hopper): x W^T of 16-bit x and 4-bit W.

The kernel computes tiles of the transposed result, W x^T. Weights are unpacked in registers, as the left operand of
wgmma, and x^T is the right operand in shared memory: a weight is unpacked once for all rows of x in a tile, up to 256.
While the products of a step are computed, the weights of the next are unpacked and the inputs of later steps loaded by
TMA. There is at most one program per multiprocessor; programs share tiles by Stream-K (stream_k.py).

W is in a GroupedLayout (packed_layout.py) of 4 bits and a span of 64. ldmatrix gives a thread pairs of words; each
holds four pairs of weights, and a pair of weights is an operand register of wgmma: no data moves between threads.
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
from engine.ops.common.launch import release, wait
from engine.ops.gemm.skinny import GATED
from engine.ops.gemm.stream_k import add_partials, begin_of, first_unit, shared_units_of, unit_after, write_partial
from engine.ops.gemm.tile_order import place_of_tile

FIELDS = gl.constexpr(4)
"""Weights per word."""
SPAN = gl.constexpr(64)
"""Words of a row of W per block, and inputs per row of x and TMA load: 128 bytes, the width of the swizzle."""
RUN = gl.constexpr(8)
"""Rows of the gate and of the up projection alternate in runs of this length in a gated tile: a thread that holds one
element of a wgmma result also holds the element this many rows further on, so that gate and up meet in one thread."""


@gluon.jit
def place_of_unit(unit, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A unit's block of inputs, first row of x and first row of W."""
    rows, weight_rows, blocks = sizes
    begin_m, begin_n = place_of_tile(unit // blocks, rows, weight_rows, BLOCK_M, BLOCK_N)
    return unit % blocks, begin_m, begin_n


@gluon.jit
def _expect(sources, buffers, stage, pred, STEP: gl.constexpr, STEPS: gl.constexpr):
    """Set how many bytes a stage's barrier waits for: x, and in the first step of a unit the unit's words."""
    x, packed = sources
    NBYTES: gl.constexpr = FIELDS // STEPS * x.block_type.nbytes + (packed.block_type.nbytes if STEP == 0 else 0)
    mbarrier.expect(buffers[2].index(stage), NBYTES, pred=pred)


@gluon.jit
def _load_words(sources, buffers, stage, word_stage, place, weight_rows, pred, EPILOGUE: gl.constexpr):
    """Start loading the words of a unit."""
    packed = sources[1]
    words = buffers[1].index(word_stage)
    barrier = buffers[2].index(stage)
    block, _, begin_n = place
    if EPILOGUE >= GATED:
        runs = words._reinterpret(words.dtype, packed.block_shape, packed.layout)
        gluon_copies.tma_load(packed, [block, begin_n // (2 * RUN), 0, 0, 0], barrier, runs, pred=pred)
    else:
        gluon_copies.tma_load(packed, [block * weight_rows + begin_n, 0], barrier, words, pred=pred)


@gluon.jit
def _load_x(sources, buffers, stage, place, pred, STEP: gl.constexpr, STEPS: gl.constexpr):
    """Start loading a step's inputs of x."""
    WIDTH: gl.constexpr = FIELDS // STEPS
    block, begin_m, _ = place
    for number in gl.static_range(WIDTH):
        start = (block * FIELDS + STEP * WIDTH + number) * SPAN
        target = buffers[0].index(stage * WIDTH + number)
        gluon_copies.tma_load(sources[0], [begin_m, start], buffers[2].index(stage), target, pred=pred)


@gluon.jit
def _refill(
    sources,
    buffers,
    stage,
    word_stage,
    place,
    weight_rows,
    pred,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """Start loading what a step needs into a free stage. The stage's barrier completes when all has arrived."""
    _expect(sources, buffers, stage, pred, STEP, STEPS)
    if STEP == 0:
        _load_words(sources, buffers, stage, word_stage, place, weight_rows, pred, EPILOGUE)
    _load_x(sources, buffers, stage, place, pred, STEP, STEPS)


@gluon.jit
def _begin_loads(
    sources,
    buffers,
    unit,
    sizes,
    shared_units,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Start loading all stages but the last. Returns the unit whose last step is to be loaded next."""
    AHEAD: gl.constexpr = STAGES // STEPS
    _, weight_rows, blocks = sizes
    units = units_of(sizes, BLOCK_M, BLOCK_N)
    loading = unit
    for number in gl.static_range(AHEAD):  # weights, which no earlier kernel writes
        place = place_of_unit(loading, sizes, BLOCK_M, BLOCK_N)
        for step in gl.static_range(STEPS):
            stage = number * STEPS + step
            if stage < STAGES - 1:
                _expect(sources, buffers, stage, loading < units, step, STEPS)
            if step == 0:
                _load_words(sources, buffers, stage, number, place, weight_rows, loading < units, EPILOGUE)
        loading = unit_after(loading, shared_units, blocks)
    wait(PDL)
    loading = unit
    for number in gl.static_range(AHEAD):
        place = place_of_unit(loading, sizes, BLOCK_M, BLOCK_N)
        for step in gl.static_range(STEPS):
            if number * STEPS + step < STAGES - 1:
                _load_x(sources, buffers, number * STEPS + step, place, loading < units, step, STEPS)
        if number < AHEAD - 1:
            loading = unit_after(loading, shared_units, blocks)
    return loading


@gluon.jit
def units_of(sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Units of all tiles."""
    rows, weight_rows, blocks = sizes
    return gl.cdiv(rows, BLOCK_M) * gl.cdiv(weight_rows, BLOCK_N) * blocks


@gluon.jit
def half_of(entry, HIGH: gl.constexpr, DTYPE: gl.constexpr):
    """The low or high 16 bits of int32 entries, as DTYPE."""
    return (entry >> (16 * HIGH)).to(gl.int16).to(DTYPE, bitcast=True)


@gluon.jit
def load_entries(scales, block, row, weight_rows, ENTRIES: gl.constexpr):
    """The entries of a block's scales for rows of W."""
    place = scales + block * (ENTRIES * weight_rows) + row
    entries = (gl.load(place),)
    for number in gl.static_range(1, ENTRIES):
        # Triton knows no *several.
        entries = entries + (gl.load(place + number * weight_rows),)  # type: ignore[assignment]  # noqa: RUF005
    return entries


@gluon.jit
def spread(values, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """One number per row -> a tile of them."""
    zeros = gl.zeros(SHAPE, gl.int16, LAYOUT)
    return (gl.expand_dims(values.to(gl.int16, bitcast=True), 1) | zeros).to(values.dtype, bitcast=True)


@gluon.jit
def _unpack(words, scale, offset, FIELD: gl.constexpr):
    """(field FIELD of the words, read as POWER + q, plus offset) times scale. A pair takes four instructions."""
    KIND: gl.constexpr = "bf16x2" if scale.dtype == gl.bfloat16 else "f16x2"
    POWERS: gl.constexpr = "0x43004300" if scale.dtype == gl.bfloat16 else "0x64006400"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shr.b32 t, $1, {4 * FIELD}; lop3.b32 t, t, 0x000F000F, {POWERS}, 0xea;"
        f" add.rn.{KIND} t, t, $3; mul.rn.{KIND} $0, t, $2; }}",
        "=r,r,r,r",
        [words, scale, offset],
        dtype=scale.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def weights_of_field(
    words,
    entries,
    FIELD: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
):
    """The fields FIELD of a tile of words as scaled weights, rounded to DTYPE once."""
    GROUP: gl.constexpr = FIELD * GROUPS // FIELDS
    LAYOUT: gl.constexpr = words.type.layout
    if ZERO_POINTS:
        scale = half_of(entries[GROUP], 0, SCALE_DTYPE)
        offset = spread(half_of(entries[GROUP], 1, DTYPE), words.shape, LAYOUT)
    else:
        scale = half_of(entries[GROUP // 2], GROUP % 2, SCALE_DTYPE)
        offset = gl.full(words.shape, -(POWER + 8), DTYPE, LAYOUT)
    return _unpack(words, spread(scale.to(DTYPE), words.shape, LAYOUT), offset, FIELD)


@gluon.jit
def row_of_lane(begin_n, lane, weight_rows, EPILOGUE: gl.constexpr):
    """The row of W of each row `lane` of a tile. Gated: runs of gate and up rows alternate."""
    if EPILOGUE >= GATED:
        outputs = weight_rows // 2
        output = begin_n // 2 + lane // (2 * RUN) * RUN + lane % RUN
        row = gl.where(output < outputs, output + lane // RUN % 2 * outputs, 0)
    else:
        row = gl.where(begin_n + lane < weight_rows, begin_n + lane, 0)
    return row  # rows beyond the last have row 0's scales and are not stored


@gluon.jit
def _store(out, result, total, bias, begin_m, begin_output, EPILOGUE: gl.constexpr, BIAS: gl.constexpr):
    """Apply bias and epilogue, transpose and store. total: [rows of W, rows of x] float32. bias: [rows of W]."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    if BIAS:
        line: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total += gl.expand_dims(gl.convert_layout(bias, line).to(gl.float32), 1)
    if EPILOGUE >= GATED:
        gate, up = total.reshape((ROWS // (2 * RUN), 2, RUN, COLUMNS)).permute((0, 2, 3, 1)).split()
        value = activate(gate, up, EPILOGUE - GATED).reshape((ROWS // 2, COLUMNS))
    else:
        value = total
    tma.store_wait(0)  # the previous tile has left `result`
    result.permute((1, 0)).store(value.to(out.dtype))
    fence_async_shared()
    gluon_copies.tma_store(out, [begin_m, begin_output], result)


@gluon.jit(do_not_specialize=["rows", "blocks"])  # Triton 3.6 cannot compile it with `blocks` the constant 1
def matmul_kernel(
    out,
    x,
    packed,
    scales,
    bias,
    partials,
    arrivals,
    rows,
    weight_rows,
    blocks,
    BLOCK_N: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: programs, at most one per multiprocessor.

    out, x: descriptors of [rows, outputs] and [rows, inputs]. packed: of a GroupedLayout's words, gated of [blocks,
    outputs / RUN, 2, RUN, SPAN], else of [blocks * outputs, SPAN]. scales: [blocks, entries, weight_rows] int32, see
    GroupedLayout; GROUPS: groups per block. partials, arrivals: see stream_k.py. BLOCK_N: rows of W per tile. STEPS:
    loop iterations per block of inputs, 2 or 4. STAGES: a multiple of it, steps whose x is in shared memory. POWER: see
    GroupedLayout.power. Loads run STAGES - 1 steps ahead of the products, across tiles.
    """
    BLOCK_M: gl.constexpr = x.block_shape[0]
    DTYPE: gl.constexpr = x.dtype
    WIDTH: gl.constexpr = FIELDS // STEPS
    WORD_STAGES: gl.constexpr = STAGES // STEPS + 1
    ENTRIES: gl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    release(PDL)
    x_stages = gl.allocate_shared_memory(DTYPE, [STAGES * WIDTH, BLOCK_M, SPAN], x.layout)
    word_stages = gl.allocate_shared_memory(gl.int16, [WORD_STAGES, BLOCK_N, SPAN], WORDS)
    result = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(filled.index(number), count=1)
    sources = (x, packed)
    buffers = (x_stages, word_stages, filled)
    sizes = (rows, weight_rows, blocks)
    units = units_of(sizes, BLOCK_M, BLOCK_N)
    shared_units = shared_units_of(units // blocks, blocks)
    range_end = begin_of(gl.program_id(0) + 1, shared_units)
    unit = first_unit(shared_units, blocks)
    loading = _begin_loads(sources, buffers, unit, sizes, shared_units, BLOCK_M, BLOCK_N, STEPS, STAGES, EPILOGUE, PDL)
    load_place = place_of_unit(loading, sizes, BLOCK_M, BLOCK_N)
    load_words = WORD_STAGES - 2
    stage = 0
    phase = 0
    word_stage = 0
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LEFT))
    while unit < units:
        first, begin_m, begin_n = place_of_unit(unit, sizes, BLOCK_M, BLOCK_N)
        tile_end = unit - first + blocks
        end = blocks
        if unit < range_end:
            end -= gl.maximum(tile_end - range_end, 0)
        row = row_of_lane(begin_n, lane, weight_rows, EPILOGUE)
        row_bias = gl.load(bias + row) if BIAS else row
        entries = load_entries(scales, first, row, weight_rows, ENTRIES)
        total = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
        for block in range(first, end):
            current = entries
            entries = load_entries(scales, gl.minimum(block + 1, blocks - 1), row, weight_rows, ENTRIES)
            for step in gl.static_range(STEPS):
                mbarrier.wait(filled.index(stage), phase)
                if step == 0:
                    words = word_stages.index(word_stage).load(LEFT)
                for number in gl.static_range(WIDTH):
                    weight = weights_of_field(
                        words, current, step * WIDTH + number, GROUPS, SCALE_DTYPE, DTYPE, POWER, ZERO_POINTS
                    )
                    right = x_stages.index(stage * WIDTH + number).permute((1, 0))
                    total = warpgroup_mma(weight, right, total, is_async=True)
                total = warpgroup_mma_wait(WIDTH, deps=[total])
                # The previous step is complete, so its stage is free.
                free = gl.where(stage == 0, STAGES - 1, stage - 1)
                _refill(
                    sources,
                    buffers,
                    free,
                    load_words,
                    load_place,
                    weight_rows,
                    loading < units,
                    (step + STEPS - 1) % STEPS,
                    STEPS,
                    EPILOGUE,
                )
                if step == 0:  # that was the last step of its unit
                    loading = unit_after(loading, shared_units, blocks)
                    load_place = place_of_unit(loading, sizes, BLOCK_M, BLOCK_N)
                    load_words = gl.where(load_words == WORD_STAGES - 1, 0, load_words + 1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            word_stage = gl.where(word_stage == WORD_STAGES - 1, 0, word_stage + 1)
        total = warpgroup_mma_wait(0, deps=[total])
        if first > 0:
            write_partial((total,), partials, arrivals)
        else:
            if end < blocks:
                total = add_partials((total,), partials, arrivals, tile_end, shared_units)[0]
            begin_output = begin_n // 2 if EPILOGUE >= GATED else begin_n
            _store(out, result, total, row_bias, begin_m, begin_output, EPILOGUE, BIAS)
        unit = unit_after(tile_end - blocks + end - 1, shared_units, blocks)
    tma.store_wait(0)
