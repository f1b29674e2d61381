"""Weight-only GEMM (W4A16, W8A16): x W^T with 16-bit x and W in 4 or 8 bits, dequantized in registers.

W is unsigned 4-bit or 8-bit integers with scales and perhaps zero points, int8, or float8 (e4m3). `packed` are int16
words of 16 / BITS fields each (ops/gemm/packed_layout.py). The fields j of a tile of words form a tile of W and
multiply SPAN consecutive inputs, so that no data moves between lanes. unpack_weights.py says how a field becomes a
number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.common.fast_math import settled
from engine.ops.common.launch import prefetch_lines, release, wait
from engine.ops.gemm.skinny import GATED
from engine.ops.gemm.unpack_weights import fma, half_of, unpack
from engine.ops.gemm.weight_tile import INTERLEAVE, reduce_and_store, rows_of_tile

GROUPS_OF_INPUTS = tl.constexpr(0)
"""scales: those of a GroupedLayout, each entry read as one int32."""
OUTPUTS = tl.constexpr(1)
"""scales: [rows of W] float32."""
BLOCKS = tl.constexpr(2)
"""scales: [ceil(rows of W / scale_rows), blocks] float32."""


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
    block, each with an equal part of every span. AHEAD: blocks to prefetch into the L2 cache before x is written; a
    power of two, or 0. partials, arrivals, polled_sums, SPLIT, POLLED, ASM: as of `reduce_and_store`.
    """
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    ENTRIES: tl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    SCALED: tl.constexpr = SCALE_LAYOUT != OUTPUTS  # scales are applied in the loop
    row = rows_of_tile(TILE, INTERLEAVE, outputs, EPILOGUE)[1]
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
    reduce_and_store(
        out,
        total,
        bias,
        partials,
        arrivals,
        polled_sums,
        tile_number,
        first,
        rows,
        outputs,
        SPLIT,
        POLLED,
        EPILOGUE,
        BIAS,
        ASM,
    )


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
