"""Weight-only GEMM (W4A16, W8A16): x W^T with 16-bit x and W in 4 or 8 bits, dequantized in registers.

W is unsigned 4-bit or 8-bit integers with scales and perhaps zero points, int8, or float8 (e4m3). `packed` are int16
words of 16 / BITS fields each (ops/gemm/packed_layout.py). The fields j of a tile of words form a tile of W and
multiply SPAN consecutive inputs, so that no data moves between lanes. unpack_weights.py says how a field becomes a
number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.activation.act_and_mul import activate
from engine.ops.common.fast_math import settled
from engine.ops.common.launch import prefetch_lines, release, wait
from engine.ops.gemm.skinny import GATED
from engine.ops.gemm.split_k_polling import poll_sums, write_sums
from engine.ops.gemm.unpack_weights import fma, half_of, unpack

GROUPS_OF_INPUTS = tl.constexpr(0)
"""scales: those of a GroupedLayout, each entry read as one int32."""
OUTPUTS = tl.constexpr(1)
"""scales: [rows of W] float32."""
BLOCKS = tl.constexpr(2)
"""scales: [ceil(rows of W / scale_rows), blocks] float32."""


INTERLEAVE = tl.constexpr(8)
"""Rows of the gate and of the up projection alternate in runs of this length in a gated tile: a thread that holds one
element of an mma result also holds the element this many rows further on, so that gate and up meet in one thread."""


@triton.jit
def _rows_of(TILE: tl.constexpr, RUN: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """For each row of a tile: the output it belongs to, and its row in W. Gated: runs of RUN gate and up rows
    alternate."""
    lane = tl.arange(0, TILE)
    if EPILOGUE >= GATED:
        output = tl.program_id(0) * (TILE // 2) + lane // (2 * RUN) * RUN + lane % RUN
        row = output + lane // RUN % 2 * outputs
    else:
        output = tl.program_id(0) * TILE + lane
        row = output
    return output, tl.where(output < outputs, row, 0)  # rows beyond the last compute row 0 and are not stored


@triton.jit
def _fetch(
    packed_row,
    scales_row,
    begin,
    end,
    block_stride,
    weight_rows,
    AHEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Prefetch up to AHEAD blocks of a tile of W, from block `begin` on but not beyond `end`, into the L2 cache.

    packed_row: pointers to block 0 of the tile's rows. scales_row: pointers to the first entries of scales of groups of
    every INTERLEAVE-th row; ENTRIES: of scales of groups per block, prefetched too; 0: there are none.
    """
    if begin < end:
        block = tl.minimum(begin + tl.arange(0, AHEAD), end - 1).to(tl.int64)
        prefetch_lines(packed_row[:, None] + (block * block_stride)[None, :])
        if ENTRIES:
            for number in tl.static_range(ENTRIES):
                prefetch_lines(scales_row[:, None] + ((block * ENTRIES + number) * weight_rows)[None, :])


@triton.jit
def _store(out, total, bias, first, rows, outputs, RUN: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr):
    """Apply bias and epilogue and store. total: [TILE, COLUMNS] float32, of the rows of x from `first` on; its rows in
    the order of `_rows_of`."""
    COLUMNS: tl.constexpr = total.shape[1]
    output, row = _rows_of(total.shape[0], RUN, outputs, EPILOGUE)
    m = first + tl.arange(0, COLUMNS)
    if BIAS:
        total += tl.load(bias + row, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE >= GATED:
        HALF: tl.constexpr = total.shape[0] // 2
        pair = tl.reshape(total, [HALF // RUN, 2, RUN, COLUMNS])
        is_gate = (tl.arange(0, 2) == 0)[None, :, None, None]
        gate = tl.sum(tl.where(is_gate, pair, 0.0), axis=1)
        up = tl.sum(tl.where(is_gate, 0.0, pair), axis=1)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        value = tl.reshape(activate(gate, up, EPILOGUE - GATED), [HALF, COLUMNS])
    else:
        n = output
        value = total
    mask = (n < outputs)[:, None] & (m < rows)[None, :]
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    out,
    x,
    packed,
    scales,
    bias,
    partials,
    arrivals,
    polled_sums,
    rows,
    outputs,
    inputs,
    row_stride,
    block_stride,
    scale_rows,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    POWER: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    SPLIT: tl.constexpr,
    POLLED: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: (tiles of W's rows, splits, tiles of x's rows).

    x: [rows, inputs], contiguous. packed, scales: of a PackedMatrix. row_stride, block_stride: of packed, in words.
    scale_rows: outputs per scale, of SCALE_LAYOUT BLOCKS. SCALE_DTYPE: dtype of scales of groups. WHOLE_BLOCKS: inputs
    fill all blocks. Each program loops over the blocks of a tile of W, dequantizes words in registers and multiplies by
    x^T on the tensor cores, accumulating in float32. SCALE_WEIGHTS: weights are scaled, and rounded to x's dtype,
    before they are multiplied; otherwise the sums of each group are scaled, in float32. PARTS: loop iterations per
    block, each with an equal part of every span. SPLIT: split-K over program_id(1); partials: [tiles, splits, TILE,
    COLUMNS] float32; arrivals: [tiles] int32, 0 before and after. POLLED: if not 0, sums are added by polling instead
    (split_k_polling.py); polled_sums: [tiles, splits - 1, TILE, COLUMNS] int32. AHEAD: blocks to prefetch into the L2
    cache before x is written; a power of two, or 0. ASM: PTX may be used.
    """
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    ENTRIES: tl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    SCALED: tl.constexpr = SCALE_LAYOUT != OUTPUTS  # scales are applied in the loop
    row = _rows_of(TILE, INTERLEAVE, outputs, EPILOGUE)[1]
    weight_rows = outputs * (2 if EPILOGUE >= GATED else 1)
    blocks = tl.cdiv(inputs, FIELDS * SPAN)
    splits = tl.num_programs(1)
    share = tl.cdiv(blocks, splits)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    packed_row = packed + row.to(tl.int64) * row_stride
    if PDL and AHEAD:
        # Every INTERLEAVE-th row: the entries of that many rows are contiguous, and share a cache line.
        row_of_run = tl.max(tl.reshape(row, [TILE // INTERLEAVE, INTERLEAVE]), axis=1)
        GROUPED: tl.constexpr = ENTRIES if SCALE_LAYOUT == GROUPS_OF_INPUTS else 0
        _fetch(packed_row, scales + row_of_run, begin, end, block_stride, weight_rows, AHEAD, GROUPED)
    if SCALE_LAYOUT == OUTPUTS:
        scale_of_row = tl.load(scales + row)  # now, as a read of memory takes long
    wait(PDL)
    first = tl.program_id(2) * COLUMNS
    m = first + tl.arange(0, COLUMNS)
    present = (m < rows)[:, None]
    x_row = x + m.to(tl.int64)[:, None] * inputs
    WIDTH: tl.constexpr = SPAN // PARTS
    k = tl.arange(0, WIDTH)
    offset = tl.full([TILE], -(POWER + 2 ** (BITS - 1)), DTYPE)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for step in tl.range(begin * PARTS, end * PARTS, num_stages=STAGES):
        block = step // PARTS
        i = step % PARTS * WIDTH + k
        tile = tl.load((packed_row + tl.cast(block, tl.int64) * block_stride)[:, None] + i[None, :])
        for group in tl.static_range(GROUPS):
            if SCALE_LAYOUT == BLOCKS:
                scale = tl.load(scales + row // scale_rows * blocks + block)
            elif SCALE_LAYOUT == GROUPS_OF_INPUTS:
                if ZERO_POINTS or group % 2 == 0:
                    entry_row = block * ENTRIES + (group if ZERO_POINTS else group // 2)
                    entry = tl.load(scales + entry_row * weight_rows + row)
                scale = half_of(entry, 0 if ZERO_POINTS else group % 2, SCALE_DTYPE)
                if ZERO_POINTS:
                    offset = half_of(entry, 1, DTYPE)
            part = tl.zeros([TILE, COLUMNS], tl.float32) if SCALED and not SCALE_WEIGHTS else total
            for span in tl.static_range(GROUP // SPAN):
                column = (block * FIELDS + group * (GROUP // SPAN) + span) * SPAN + i
                mask = present if WHOLE_BLOCKS else present & (column < inputs)[None, :]
                columns = tl.load(x_row + column[None, :], mask=mask, other=0.0)
                numbers = unpack(
                    tile,
                    tl.broadcast_to(offset[:, None], [TILE, WIDTH]),
                    group * (GROUP // SPAN) + span,
                    BITS,
                    VALUE_TYPE,
                    POWER,
                    ASM,
                )
                if SCALED and SCALE_WEIGHTS:
                    factor = tl.broadcast_to(scale.to(DTYPE)[:, None], [TILE, WIDTH])
                    numbers = fma(numbers, factor, tl.full([TILE, WIDTH], -0.0, DTYPE)) if ASM else numbers * factor
                part = tl.dot(numbers, tl.trans(columns), part)
            total = total + part * scale.to(tl.float32)[:, None] if SCALED and not SCALE_WEIGHTS else part
        # Triton lets the last product of an iteration overlap with the next iteration if nothing uses its result in
        # between. With W in registers this backfires: ptxas then waits after every single wgmma (C7515).
        if ASM and COLUMNS > 8 and (SCALE_WEIGHTS or not SCALED):
            total = settled(total)
    release(PDL)  # late, as a long kernel: see ops/common/launch.py
    if SCALE_LAYOUT == OUTPUTS:
        total *= scale_of_row[:, None]
    tile_number = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    if POLLED:
        buffer = polled_sums + tile_number * (splits - 1) * (TILE * COLUMNS)
        if tl.program_id(1) < splits - 1:
            write_sums(total, buffer)
        else:
            total += poll_sums(buffer, splits - 1, total.shape, POLLED, ASM)
            _store(out, total, bias, first, rows, outputs, INTERLEAVE, EPILOGUE, BIAS)
    elif SPLIT:
        HALF: tl.constexpr = TILE // 2
        lane = tl.arange(0, TILE)
        place = lane
        if EPILOGUE >= GATED:  # gate rows before up rows, so that the reading thread has both
            place = lane // (2 * INTERLEAVE) * INTERLEAVE + lane % INTERLEAVE + lane // INTERLEAVE % 2 * HALF
        ours = partials + tile_number * splits * (TILE * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
        tl.store(ours + (tl.program_id(1) * TILE + place)[:, None] * COLUMNS, total)
        tl.debug_barrier()  # all threads' sums are written before the counter changes
        arrived = tl.atomic_add(arrivals + tile_number, 1, sem="acq_rel")
        if arrived == splits - 1:
            total = tl.zeros([TILE, COLUMNS], tl.float32)
            for split in range(splits):
                total += tl.load(ours + (split * TILE + lane)[:, None] * COLUMNS, cache_modifier=".cg")
            tl.store(arrivals + tile_number, 0)
            _store(out, total, bias, first, rows, outputs, HALF, EPILOGUE, BIAS)
    else:
        _store(out, total, bias, first, rows, outputs, INTERLEAVE, EPILOGUE, BIAS)


@triton.jit
def dequantize_kernel(
    out,
    packed,
    scales,
    outputs,
    inputs,
    row_stride,
    block_stride,
    scale_rows,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    POWER: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize W: out [outputs, inputs], rounded once to out's dtype. Grid: (tiles of outputs, blocks).

    The rest as in `matmul_kernel`.
    """
    release(PDL)
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    ENTRIES: tl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1)
    valid = row < outputs
    k = tl.arange(0, SPAN)
    packed_row = packed + row.to(tl.int64) * row_stride + tl.cast(block, tl.int64) * block_stride
    tile = tl.load(packed_row[:, None] + k[None, :], mask=valid[:, None], other=0)
    offset = tl.full([TILE], -(POWER + 2 ** (BITS - 1)), DTYPE)
    out_row = out + row.to(tl.int64)[:, None] * inputs
    wait(PDL)  # earlier kernels may still read what is overwritten
    for group in tl.static_range(GROUPS):
        if SCALE_LAYOUT == OUTPUTS:
            scale = tl.load(scales + row, mask=valid, other=0.0)
        elif SCALE_LAYOUT == BLOCKS:
            scale = tl.load(scales + row // scale_rows * tl.num_programs(1) + block, mask=valid, other=0.0)
        else:
            if ZERO_POINTS or group % 2 == 0:
                entry_row = block * ENTRIES + (group if ZERO_POINTS else group // 2)
                entry = tl.load(scales + entry_row * outputs + row, mask=valid, other=0)
            scale = half_of(entry, 0 if ZERO_POINTS else group % 2, SCALE_DTYPE)
            if ZERO_POINTS:
                offset = half_of(entry, 1, DTYPE)
        for span in tl.static_range(GROUP // SPAN):
            column = (block * FIELDS + group * (GROUP // SPAN) + span) * SPAN + k
            numbers = unpack(
                tile,
                tl.broadcast_to(offset[:, None], [TILE, SPAN]),
                group * (GROUP // SPAN) + span,
                BITS,
                VALUE_TYPE,
                POWER,
                ASM,
            )
            weight = numbers.to(tl.float32) * scale.to(tl.float32)[:, None]
            tl.store(out_row + column[None, :], weight.to(DTYPE), mask=valid[:, None] & (column < inputs)[None, :])


GATHERED = 2048
"""Inputs per program of gather_kernel."""


@triton.jit
def gather_kernel(out, x, order, inputs, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row, i] = x[row, order[i]]. x: [rows, inputs]; order: [count] int32. Grid: (rows, blocks of order)."""
    release(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < count
    source = tl.load(order + column, mask=mask, other=0)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    tl.store(out + row * count + column, tl.load(x + row * inputs + source, mask=mask, other=0.0), mask=mask)
