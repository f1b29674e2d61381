"""x W^T where x has 16 bits and W 4 or 8: whole numbers with a scale, and perhaps a zero point, or float8 (e4m3).

`words` are int16 with 16 / BITS numbers each. The fields j of a tile of words are a tile of W as it stands, and meet
SPAN inputs side by side: nothing moves between lanes. The layouts: ops/gemm/packed_layout.py.

A field becomes a number without a conversion, which would take longer than reading it. A whole number's bits are put
below the exponent of a power of two (POWER) so large that its last place is worth 1, and the power is taken away again
with the zero point. Both steps are exact. Source: Kim et al., "Who Says Elephants Can't Run", 2022, for float16.
bfloat16 has no room for 8 bits there; see `_numbers`. A float8's exponent and fraction are put where the wider type has
them, and a multiplication makes up for the other bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.activation.silu_and_mul import silu
from engine.ops.common.launch import release, wait
from engine.ops.gemm.skinny import GATED

UNSIGNED = tl.constexpr(0)
"""A field is a whole number; what it is less than the zero point counts."""
SIGNED = tl.constexpr(1)
"""A field is an int8. Its sign is turned over, which makes it unsigned with a zero point of 128."""
FLOAT8 = tl.constexpr(2)
"""A field is a float8, e4m3."""
GROUPS_OF_INPUTS = tl.constexpr(0)
"""scales: those of a Layout, an entry read as one int32."""
OUTPUTS = tl.constexpr(1)
"""scales: [rows of W] float32."""
BLOCKS = tl.constexpr(2)
"""scales: [ceil(rows of W / scale_rows), blocks] float32."""


@triton.jit
def _fma(a, b, c):
    """a * b + c, two 16-bit numbers at a time."""
    if a.dtype == tl.bfloat16:
        total = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        total = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
        )
    return total


@triton.jit
def _settled(total):
    """The same sums, as something that is computed from them, at no instruction."""
    return tl.inline_asm_elementwise("// $0", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _insert(words, SHIFT: tl.constexpr, MASK: tl.constexpr, CHANGE: tl.constexpr, DTYPE: tl.constexpr):
    """(word >> SHIFT & MASK) ^ CHANGE as a number, two words at a time; MASK and CHANGE cover both."""
    bits = tl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK}, {CHANGE}, 0x6a; }}",
        "=r,r",
        [words],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _float8(words, J: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The e4m3 codes in the fields J of a tile of words. Numbers below 2^-6 come out right; codes of NaN do not."""
    if ASM:
        HALF: tl.constexpr = DTYPE.is_fp16()
        RIGHT: tl.constexpr = 1 if HALF else 4
        MASK: tl.constexpr = 0x3F803F80 if HALF else 0x07F007F0
        bits = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, s; shl.b32 t, $1, {8 - 8 * J}; and.b32 s, t, 0x80008000; shr.b32 t, t, {RIGHT};"
            f" lop3.b32 $0, t, {MASK}, s, 0xea; }}",
            "=r,r",
            [words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        BIAS: tl.constexpr = 256.0 if HALF else 2.0**120
        numbers = bits.to(DTYPE, bitcast=True)
        numbers = _fma(numbers, tl.full(words.shape, BIAS, DTYPE), tl.full(words.shape, -0.0, DTYPE))
    else:
        byte = (words.to(tl.int32) >> (8 * J)) & 0xFF
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        numbers = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(DTYPE)
    return numbers


@triton.jit
def _numbers(
    words, offset, J: tl.constexpr, BITS: tl.constexpr, CODE: tl.constexpr, POWER: tl.constexpr, ASM: tl.constexpr
):
    """The fields J of a tile of words as numbers, less a zero point, in the type of `offset`, which has its shape."""
    if CODE == FLOAT8:
        numbers = _float8(words, J, offset.dtype, ASM)
    elif ASM:
        one = tl.full(words.shape, 1.0, offset.dtype)
        if offset.dtype == tl.float16:
            MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
            CHANGE: tl.constexpr = 0x64806480 if CODE == SIGNED else 0x64006400
            numbers = _fma(_insert(words, BITS * J, MASK, CHANGE, tl.float16), one, offset)
        else:
            numbers = _fma(_insert(words, BITS * J, 0x000F000F, 0x43004300, tl.bfloat16), one, offset)
            if BITS == 8:
                # The upper half of a field: 2048 + 16 * half. What is left has 8 significant bits, as bfloat16.
                UPPER: tl.constexpr = 0x45084508 if CODE == SIGNED else 0x45004500
                upper = _insert(words, 8 * J + 4, 0x000F000F, UPPER, tl.bfloat16)
                numbers = _fma(_fma(upper, one, tl.full(words.shape, -2176.0, tl.bfloat16)), one, numbers)
    else:
        field = (words.to(tl.int32) >> (BITS * J)) & (2**BITS - 1)
        if CODE == SIGNED:
            field = field ^ 0x80
        numbers = (field.to(tl.float32) + (offset.to(tl.float32) + POWER)).to(offset.dtype)
    return numbers


@triton.jit
def half_of(entry, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The low or the high half of int32 entries, as numbers."""
    return (entry >> (16 * HIGH)).to(tl.int16).to(DTYPE, bitcast=True)


TOGETHER = tl.constexpr(8)
"""So many rows of W's first half come before those of the second that they are multiplied with: a thread that has one
number of a matrix instruction's result has the one so many rows further on too."""


@triton.jit
def _rows_of(TILE: tl.constexpr, RUN: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """For each row of a tile: the output it belongs to, and its row in W; RUN of either half follow each other."""
    lane = tl.arange(0, TILE)
    if EPILOGUE == GATED:
        output = tl.program_id(0) * (TILE // 2) + lane // (2 * RUN) * RUN + lane % RUN
        row = output + lane // RUN % 2 * outputs
    else:
        output = tl.program_id(0) * TILE + lane
        row = output
    return output, tl.where(output < outputs, row, 0)  # what lies beyond is computed from row 0, and not stored


@triton.jit
def _store(out, total, bias, first, rows, outputs, RUN: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr):
    """total: [TILE, COLUMNS] float32, of rows `first` and on of x; its rows as `_rows_of` has them."""
    COLUMNS: tl.constexpr = total.shape[1]
    output, row = _rows_of(total.shape[0], RUN, outputs, EPILOGUE)
    m = first + tl.arange(0, COLUMNS)
    if BIAS:
        total += tl.load(bias + row, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE == GATED:
        HALF: tl.constexpr = total.shape[0] // 2
        pair = tl.reshape(total, [HALF // RUN, 2, RUN, COLUMNS])
        is_gate = (tl.arange(0, 2) == 0)[None, :, None, None]
        gate = tl.sum(tl.where(is_gate, pair, 0.0), axis=1)
        up = tl.sum(tl.where(is_gate, 0.0, pair), axis=1)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        value = tl.reshape(silu(gate) * up, [HALF, COLUMNS])
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
    words,
    scales,
    bias,
    partials,
    arrivals,
    rows,
    outputs,
    inputs,
    row_stride,
    block_stride,
    scale_rows,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    POWER: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [rows, inputs] dense. Grid: tiles of W's rows, splits, tiles of x's rows.

    row_stride, block_stride: in words. SCALE: the type of scales of groups. EVEN: the last block is full. EARLY: W is
    scaled, and rounded to x's type, before it is multiplied; otherwise the sums of each group are, in float32. PARTS:
    steps that a block takes, each with so large a part of every field, and of the x it meets in shared memory. SPLIT:
    programs that differ in their second number share the blocks of a tile; partials: [tiles, splits, TILE, COLUMNS]
    float32; arrivals: [tiles] int32, 0 before and after.
    """
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    ENTRIES: tl.constexpr = GROUPS if ZEROS else GROUPS // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    SCALED: tl.constexpr = SCALES != OUTPUTS  # in the loop
    row = _rows_of(TILE, TOGETHER, outputs, EPILOGUE)[1]
    weight_rows = outputs * (2 if EPILOGUE == GATED else 1)
    blocks = tl.cdiv(inputs, FIELDS * SPAN)
    splits = tl.num_programs(1)
    share = tl.cdiv(blocks, splits)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    words_row = words + row.to(tl.int64) * row_stride
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
        tile = tl.load((words_row + tl.cast(block, tl.int64) * block_stride)[:, None] + i[None, :])
        for group in tl.static_range(GROUPS):
            if SCALES == BLOCKS:
                scale = tl.load(scales + row // scale_rows * blocks + block)
            elif SCALES == GROUPS_OF_INPUTS:
                if ZEROS or group % 2 == 0:
                    entry_row = block * ENTRIES + (group if ZEROS else group // 2)
                    entry = tl.load(scales + entry_row * weight_rows + row)
                scale = half_of(entry, 0 if ZEROS else group % 2, SCALE)
                if ZEROS:
                    offset = half_of(entry, 1, DTYPE)
            part = tl.zeros([TILE, COLUMNS], tl.float32) if SCALED and not EARLY else total
            for span in tl.static_range(GROUP // SPAN):
                column = (block * FIELDS + group * (GROUP // SPAN) + span) * SPAN + i
                mask = present if EVEN else present & (column < inputs)[None, :]
                columns = tl.load(x_row + column[None, :], mask=mask, other=0.0)
                numbers = _numbers(
                    tile,
                    tl.broadcast_to(offset[:, None], [TILE, WIDTH]),
                    group * (GROUP // SPAN) + span,
                    BITS,
                    CODE,
                    POWER,
                    ASM,
                )
                if SCALED and EARLY:
                    factor = tl.broadcast_to(scale.to(DTYPE)[:, None], [TILE, WIDTH])
                    numbers = _fma(numbers, factor, tl.full([TILE, WIDTH], -0.0, DTYPE)) if ASM else numbers * factor
                part = tl.dot(numbers, tl.trans(columns), part)
            total = total + part * scale.to(tl.float32)[:, None] if SCALED and not EARLY else part
        # Triton lets the last multiplication of an iteration overlap with the next one if nothing uses its result in
        # between. As W comes from registers that does not work out: ptxas then waits after every single wgmma (C7515).
        if ASM and COLUMNS > 8 and (EARLY or not SCALED):
            total = _settled(total)
    release(PDL)  # see kernels.launch
    if SCALES == OUTPUTS:
        total *= tl.load(scales + row)[:, None]
    if SPLIT:
        tile_number = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        HALF: tl.constexpr = TILE // 2
        lane = tl.arange(0, TILE)
        place = lane
        if EPILOGUE == GATED:  # the halves one after the other, as who reads them has both in the same thread
            place = lane // (2 * TOGETHER) * TOGETHER + lane % TOGETHER + lane // TOGETHER % 2 * HALF
        ours = partials + tile_number * splits * (TILE * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
        tl.store(ours + (tl.program_id(1) * TILE + place)[:, None] * COLUMNS, total)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        arrived = tl.atomic_add(arrivals + tile_number, 1, sem="acq_rel")
        if arrived == splits - 1:
            total = tl.zeros([TILE, COLUMNS], tl.float32)
            for split in range(splits):
                total += tl.load(ours + (split * TILE + lane)[:, None] * COLUMNS, cache_modifier=".cg")
            tl.store(arrivals + tile_number, 0)
            _store(out, total, bias, first, rows, outputs, HALF, EPILOGUE, BIAS)
    else:
        _store(out, total, bias, first, rows, outputs, TOGETHER, EPILOGUE, BIAS)


@triton.jit
def dequantize_kernel(
    out,
    words,
    scales,
    outputs,
    inputs,
    row_stride,
    block_stride,
    scale_rows,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    POWER: tl.constexpr,
    ZEROS: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [outputs, inputs], W rounded once to out's type. Grid: tiles of outputs, blocks."""
    release(PDL)
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    ENTRIES: tl.constexpr = GROUPS if ZEROS else GROUPS // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1)
    valid = row < outputs
    k = tl.arange(0, SPAN)
    words_row = words + row.to(tl.int64) * row_stride + tl.cast(block, tl.int64) * block_stride
    tile = tl.load(words_row[:, None] + k[None, :], mask=valid[:, None], other=0)
    offset = tl.full([TILE], -(POWER + 2 ** (BITS - 1)), DTYPE)
    out_row = out + row.to(tl.int64)[:, None] * inputs
    wait(PDL)  # for who reads what is overwritten
    for group in tl.static_range(GROUPS):
        if SCALES == OUTPUTS:
            scale = tl.load(scales + row, mask=valid, other=0.0)
        elif SCALES == BLOCKS:
            scale = tl.load(scales + row // scale_rows * tl.num_programs(1) + block, mask=valid, other=0.0)
        else:
            if ZEROS or group % 2 == 0:
                entry_row = block * ENTRIES + (group if ZEROS else group // 2)
                entry = tl.load(scales + entry_row * outputs + row, mask=valid, other=0)
            scale = half_of(entry, 0 if ZEROS else group % 2, SCALE)
            if ZEROS:
                offset = half_of(entry, 1, DTYPE)
        for span in tl.static_range(GROUP // SPAN):
            column = (block * FIELDS + group * (GROUP // SPAN) + span) * SPAN + k
            numbers = _numbers(
                tile,
                tl.broadcast_to(offset[:, None], [TILE, SPAN]),
                group * (GROUP // SPAN) + span,
                BITS,
                CODE,
                POWER,
                ASM,
            )
            weight = numbers.to(tl.float32) * scale.to(tl.float32)[:, None]
            tl.store(out_row + column[None, :], weight.to(DTYPE), mask=valid[:, None] & (column < inputs)[None, :])


GATHERED = 2048
"""Inputs that a program of gather_kernel takes."""


@triton.jit
def gather_kernel(out, x, order, inputs, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row, i] = x[row, order[i]]; order: [count]. Grid: rows, blocks of order."""
    release(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < count
    source = tl.load(order + column, mask=mask, other=0)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    tl.store(out + row * count + column, tl.load(x + row * inputs + source, mask=mask, other=0.0), mask=mask)
