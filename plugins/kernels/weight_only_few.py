"""What weight_only.matmul_kernel computes, for few rows of x, where how soon weights begin to come is what counts.

Each warp of a program multiplies blocks of its own of the same rows of W, and the sums meet at the end: nothing goes
through shared memory before. A warp loads words so that each lane has them where the tensor cores want its share of a
matrix. That takes another order of inputs, which does not change a sum as long as x has it too. The first words are
asked for before the kernel waits for the one that writes x, and programs are small, so that they find room while the
kernels before still run.

Two words are read as one number of 32 bits, a pair. Of a fragment lane 4 g + t has four pairs side by side, of the rows
g, g + 8, ...: bits 1 and 0 of a pair's number, t, and the word's number in its pair become bits 4 3, 2 1 and 0 of the
place at which mma.m16n8k16 has it. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16".

A field becomes a number in as few instructions as can be. The bits of a whole number of BITS are put right below the
exponent of 2^BITS, which makes it 2^BITS more. What it is too much, zero point and all, times the sum of x is taken
away from the sum. A float8 in the place of a wider number is too small by a power of two, which the sum makes up for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.core.kernels.launch import release, wait
from engine.core.kernels.skinny import GATED, place_of, rows_of
from engine.plugins.kernels.weight_only import (
    BLOCKS,
    FLOAT8,
    GROUPS_OF_INPUTS,
    OUTPUTS,
    SIGNED,
    half_of,
    store_sums,
)

PAIRS = tl.constexpr(16)
"""Of words, that a lane of four has 4 of each."""
SMALL_SUMS = tl.constexpr(True)
"""Whether float8 codes are multiplied while they are too small, for tensor cores that know subnormal numbers."""


@triton.jit
def _place(LANES: tl.constexpr, WARPS: tl.constexpr):
    """For the rows of a tensor as it is loaded, eight of a matrix for each warp in turn: the row, and the warp."""
    lane = tl.arange(0, LANES)
    return lane // (8 * WARPS) * 8 + lane % 8, lane // 8 % WARPS


@triton.jit
def _fragment(pairs, DTYPE: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr):
    """[as `_place`, PAIRS] -> [warps, rows, 2 * PAIRS] numbers in the order of the tensor cores, without a move."""
    if ASM:  # casts would be undone and done again around the loop
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(tl.int16, tl.int16), is_pure=True, pack=1
        )
    else:
        low = pairs.to(tl.int16)
        high = (pairs >> 16).to(tl.int16)
    EIGHTS: tl.constexpr = pairs.shape[0] // (8 * WARPS)
    x = tl.reshape(tl.join(low, high).to(DTYPE, bitcast=True), [EIGHTS, WARPS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(x, [1, 0, 2, 5, 3, 4, 6]), [WARPS, EIGHTS * 8, 2 * PAIRS])


@triton.jit
def _moved(pairs, DOWN: tl.constexpr, MASK: tl.constexpr, CHANGE: tl.constexpr, ASM: tl.constexpr):
    """(word >> DOWN & MASK) ^ CHANGE, for each; DOWN < 0: up."""
    moved = pairs >> DOWN if DOWN >= 0 else pairs << -DOWN
    if ASM:  # of two constants one must be in a register, which the compiler does not think worth it
        moved = tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, {MASK * 0x10001}, {CHANGE * 0x10001}, 0x6a;",
            "=r,r",
            [moved],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        moved = (moved & (MASK * 0x10001)) ^ (CHANGE * 0x10001)
    return moved


@triton.jit
def _float8(pairs, J: tl.constexpr, DTYPE: tl.constexpr):
    """The e4m3 codes in the fields J as numbers of DTYPE, too small by 2^8 (float16) or 2^120; NaN is read as 480."""
    UP: tl.constexpr = 7 if DTYPE.is_fp16() else 4
    sign = pairs if J else pairs << 8
    rest = pairs >> (8 - UP) if J else pairs << UP
    return (sign & -0x7FFF8000) | (rest & ((0x7F << UP) * 0x10001))


@triton.jit
def _times(
    pairs,
    right,
    part,
    J: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    DTYPE: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """part + the fields J, as numbers with what is too much, times `right`."""
    FLIP: tl.constexpr = 0x80 if CODE == SIGNED else 0
    if CODE == FLOAT8:
        numbers = _float8(pairs, J, DTYPE)
    elif DTYPE.is_fp16():
        PLACE: tl.constexpr = 10 - BITS
        EXPONENT: tl.constexpr = 15 + BITS << 10
        numbers = _moved(pairs, BITS * J - PLACE, (2**BITS - 1) << PLACE, EXPONENT ^ (FLIP << PLACE), ASM)
    elif BITS == 4:
        numbers = _moved(pairs, 4 * J - 3, 0xF << 3, 131 << 7, ASM)
    else:  # no room for 8 bits: the lower half with 16 more, then the upper one with 256 more
        numbers = _moved(pairs, 8 * J - 3, 0xF << 3, 131 << 7, ASM)
        part = tl.dot(_fragment(numbers, DTYPE, WARPS, ASM), right, part)
        numbers = _moved(pairs, 8 * J + 1, 0xF << 3, (135 << 7) ^ (FLIP >> 1), ASM)
    left = _fragment(numbers, DTYPE, WARPS, ASM)
    if CODE == FLOAT8 and not SMALL_SUMS:
        left *= tl.full(left.shape, 2.0**120 if DTYPE.is_bf16() else 2.0**8, DTYPE)
    return tl.dot(left, right, part)


@triton.jit
def _of_sums(entry, TILE: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """[rows as `_place`, 4 alike] in one dimension -> [warps, rows, COLUMNS], alike for all columns."""
    x = tl.permute(tl.reshape(entry, [TILE // 8, WARPS, 8, 1, 4, 1]), [1, 0, 2, 3, 4, 5])
    return tl.reshape(tl.broadcast_to(x, [WARPS, TILE // 8, 8, COLUMNS // 8, 4, 2]), [WARPS, TILE, COLUMNS])


@triton.jit
def _wide(sums, TILE: tl.constexpr):
    """[warps, 16, COLUMNS], alike for all rows -> [warps, TILE, COLUMNS]."""
    WARPS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[2]
    x = tl.broadcast_to(tl.reshape(sums, [WARPS, 1, 16, COLUMNS]), [WARPS, TILE // 16, 16, COLUMNS])
    return tl.reshape(x, [WARPS, TILE, COLUMNS])


@triton.jit
def _with(several, NUMBER: tl.constexpr, one):
    """A tuple with another one in one place."""
    return several[:NUMBER] + (one,) + several[NUMBER + 1 :]  # noqa: RUF005 Triton knows no *several


@triton.jit
def _moved_up(several, NUMBER: tl.constexpr, STEP: tl.constexpr, last):
    """Each of those `STEP` apart from NUMBER on in the place of the one before, and `last` in that of the last one."""
    LENGTH: tl.constexpr = len(several)
    for number in tl.static_range(NUMBER, LENGTH - STEP, STEP):
        several = _with(several, number, several[number + STEP])
    return _with(several, LENGTH - STEP + NUMBER, last)


@triton.jit
def _block(start, warp, blocks, WARPS: tl.constexpr, EVEN: tl.constexpr):
    """A warp's, counted from its first one; where there is no more a last one again, which meets zeros or nothing."""
    block = tl.minimum(start, blocks - WARPS) if EVEN else tl.minimum(start + warp, blocks - 1) - warp
    return block.to(tl.int64)


@triton.jit
def _first(
    place, apart, warp, blocks, step, WARPS: tl.constexpr, EVEN: tl.constexpr, COUNT: tl.constexpr, AHEAD: tl.constexpr
):
    """What is at COUNT places, `apart`, of each of the first AHEAD blocks."""
    found = (tl.load(place + _block(0, warp, blocks, WARPS, EVEN) * step),) * (COUNT * AHEAD)
    for ahead in tl.static_range(AHEAD):
        first = place + _block(ahead * WARPS, warp, blocks, WARPS, EVEN) * step
        for number in tl.static_range(COUNT):
            found = _with(found, ahead * COUNT + number, tl.load(first + number * apart))
    return found


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    out,
    x,
    words,
    scales,
    bias,
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
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments: see weight_only.matmul_kernel. inputs: even; rows <= COLUMNS; EVEN: all warps have as many blocks, all
    of them full; AHEAD: blocks of a warp that are on their way at once. Grid: tiles of W's rows."""
    release(PDL)
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    HALVES: tl.constexpr = SPAN // 32  # of two times PAIRS words
    ENTRIES: tl.constexpr = 1 if SCALES == BLOCKS else GROUPS if ZEROS else GROUPS // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    MORE: tl.constexpr = 272 if BITS == 8 and DTYPE.is_bf16() else 2**BITS  # see `_times`
    SMALL: tl.constexpr = CODE == FLOAT8 and SMALL_SUMS
    ROOT: tl.constexpr = (
        1.0 if not SMALL else 2.0**60 if DTYPE.is_bf16() else 2.0**4
    )  # of what numbers are too small by
    blocks = tl.cdiv(inputs, FIELDS * SPAN)
    pair = tl.arange(0, PAIRS)[None, :]
    local, warp = _place(TILE * WARPS, WARPS)
    output, row = place_of(local, TILE, outputs, EPILOGUE)
    row = tl.where(output < outputs, row, 0)  # what lies beyond is computed from row 0, and not stored
    step = tl.cast(block_stride // 2, tl.int64)
    place = words.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * (row_stride // 2) + warp * step)
    place = place[:, None] + pair
    warp = warp[:, None]
    tile = _first(place, PAIRS, warp, blocks, step, WARPS, EVEN, HALVES, AHEAD)
    if SCALES != OUTPUTS:
        lane = tl.arange(0, TILE * WARPS * 4)
        entry_warp = lane // 32 % WARPS
        output, row = place_of(lane // (32 * WARPS) * 8 + lane // 4 % 8, TILE, outputs, EPILOGUE)
        row = tl.where(output < outputs, row, 0)
        between = outputs * 2 if EPILOGUE == GATED else outputs
        entry_step = 1 if SCALES == BLOCKS else between * ENTRIES
        entry_place = scales + ((row // scale_rows * blocks if SCALES == BLOCKS else row) + entry_warp * entry_step)
        entries = _first(entry_place, between, entry_warp, blocks, entry_step, WARPS, EVEN, ENTRIES, AHEAD)
    m, x_warp = _place(COLUMNS * WARPS, WARPS)
    column = (x_warp * (FIELDS * SPAN // 2))[:, None] + pair
    x_place = (x.to(tl.pointer_type(tl.int32)) + tl.minimum(m, rows - 1) * (inputs // 2))[:, None] + column
    wait(PDL)

    total = tl.zeros([WARPS, TILE, COLUMNS], tl.float32)
    for start in range(AHEAD * WARPS, blocks + AHEAD * WARPS, WARPS):
        following = place + _block(start, warp, blocks, WARPS, EVEN) * step
        parts = (total if SCALES == OUTPUTS else tl.zeros([WARPS, TILE, COLUMNS], tl.float32),) * GROUPS
        sums = (tl.zeros([WARPS, 16, COLUMNS], tl.float32),) * GROUPS
        for half in tl.static_range(HALVES):
            for group in tl.static_range(GROUPS):
                for span in tl.static_range(GROUP // SPAN):
                    field = group * (GROUP // SPAN) + span
                    number = field * HALVES + half
                    if EVEN:
                        x_pairs = tl.load(x_place + number * PAIRS)
                    else:
                        x_pairs = tl.load(x_place + number * PAIRS, mask=column + number * PAIRS < inputs // 2, other=0)
                    right = tl.permute(_fragment(x_pairs, DTYPE, WARPS, ASM), [0, 2, 1])
                    part = _times(tile[half], right, parts[group], field, BITS, CODE, DTYPE, WARPS, ASM)
                    parts = _with(parts, group, part)
                    if CODE != FLOAT8:
                        ones = tl.full([WARPS, 16, 2 * PAIRS], 1.0, DTYPE)
                        sums = _with(sums, group, tl.dot(ones, right, sums[group]))
            tile = _moved_up(tile, half, HALVES, tl.load(following + half * PAIRS))
        for group in tl.static_range(GROUPS):
            part = parts[group]
            if SCALES == GROUPS_OF_INPUTS:
                entry = entries[group if ZEROS else group // 2]
                scale = _of_sums(half_of(entry, 0 if ZEROS else group % 2, SCALE).to(tl.float32), TILE, COLUMNS, WARPS)
            elif SCALES == BLOCKS:
                scale = _of_sums(entries[0] * ROOT, TILE, COLUMNS, WARPS)
            if ZEROS:
                offset = _of_sums(half_of(entry, 1, DTYPE).to(tl.float32) + (POWER - MORE), TILE, COLUMNS, WARPS)
                part += _wide(sums[group], TILE) * offset
            elif CODE != FLOAT8:
                part += _wide(sums[group], TILE) * -(MORE + 2.0 ** (BITS - 1))
            total = part if SCALES == OUTPUTS else total + part * scale
        if SCALES != OUTPUTS:
            following_entries = entry_place + _block(start, entry_warp, blocks, WARPS, EVEN) * entry_step
            for number in tl.static_range(ENTRIES):
                entries = _moved_up(entries, number, ENTRIES, tl.load(following_entries + number * between))
        x_place += FIELDS * SPAN * WARPS // 2
        column += FIELDS * SPAN * WARPS // 2
    output, row = rows_of(TILE, outputs, EPILOGUE)
    row = tl.where(output < outputs, row, 0)
    result = tl.sum(total, axis=0) * ROOT
    if SCALES == OUTPUTS:
        result *= (tl.load(scales + row) * ROOT)[:, None]
    store_sums(out, result, bias, output, row, 0, rows, outputs, EPILOGUE, BIAS)
