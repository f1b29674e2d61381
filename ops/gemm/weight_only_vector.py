"""Weight-only GEMV: what weight_only.matmul_kernel computes, for one row of x, bound by the latency of reading W.

A program holds words of a few rows of W in registers, multiplies element by element and sums at the end. Programs are
small and exchange no data, so that the next kernel's programs fit next to them and load their first words while
this kernel ends (programmatic dependent launch).

Two words are read as one 32-bit pair and multiplied by pairs of x. An integer's bits are put into the fraction of 1.0,
which gives 1 + q * 2^-s in one or two instructions. x is multiplied by 2^s, and the excess, the sum of the scaled x, is
subtracted afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.common.launch import release, wait
from engine.ops.gemm.skinny import GATED, place_of, rows_of, store_vector
from engine.ops.gemm.unpack_weights import FLOAT8, SIGNED, half_of
from engine.ops.gemm.weight_only import BLOCKS, GROUPS_OF_INPUTS, OUTPUTS

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0."""


@triton.jit
def _wide(pairs, HIGH: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The low or high element of pairs of DTYPE, as float32."""
    if DTYPE.is_bf16():
        wide = (pairs & -0x10000 if HIGH else pairs << 16).to(tl.float32, bitcast=True)
    elif ASM:
        HALF: tl.constexpr = "h" if HIGH else "l"
        wide = tl.inline_asm_elementwise(
            f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {HALF}; }}",
            "=f,r",
            [pairs],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        wide = half_of(pairs, HIGH, DTYPE).to(tl.float32)
    return wide


@triton.constexpr_function
def _place(bit, bits):
    """The bit of a float32 that the field from `bit` on is moved to. Fields that need the same shift share it."""
    if bits == 8:
        return 8
    return 12 if bit % 8 == 4 and bit < 28 else 16


@triton.constexpr_function
def _factor(bit, bits):
    """The inverse of what 1 is worth at that bit."""
    return 2.0 ** (23 - _place(bit, bits))


@triton.jit
def _field(pairs, BIT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """1 + q / _factor, q the field from bit BIT on."""
    PLACE: tl.constexpr = _place(BIT, BITS)
    if ASM and BITS == 8:  # a byte between constant bytes
        SELECT: tl.constexpr = 0x7604 + (BIT // 8 << 4)
        bits = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, {ONE}, {SELECT};",
            "=r,r",
            [pairs],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        moved = pairs >> (BIT - PLACE) if BIT > PLACE else pairs << (PLACE - BIT)
        MASK: tl.constexpr = (2**BITS - 1) << PLACE
        if ASM:  # one of the two constants must be in a register; the compiler would not keep it there
            bits = tl.inline_asm_elementwise(
                f"lop3.b32 $0, $1, {MASK}, {ONE}, 0xea;",
                "=r,r",
                [moved],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            bits = (moved & MASK) | ONE
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float16s(pairs, ASM: tl.constexpr):
    """Pairs of words of float8 (e4m3) as pairs of float16: of the lower words, and of the upper words."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low = _float16(pairs) | (_float16(pairs >> 8) << 16)
        high = _float16(pairs >> 16) | (_float16(pairs >> 24) << 16)
    return low, high


@triton.jit
def _float16(value):
    """The bits of the float16 equal to the float8 in the lowest 8 bits; not for NaN."""
    bits = (((value & 0x80) << 8) | ((value & 0x7F) << 7)).to(tl.int16)
    number = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)
    return number.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _with(several, NUMBER: tl.constexpr, one):
    """The tuple `several` with element NUMBER replaced."""
    return several[:NUMBER] + (one,) + several[NUMBER + 1 :]  # noqa: RUF005 Triton knows no *several


@triton.jit
def _row(R: tl.constexpr, TILE: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """The row of W of row R of a tile; 0 for rows beyond the last, which are not stored."""
    output, row = place_of(R, TILE, outputs, EPILOGUE)
    return tl.where(output < outputs, row, 0).to(tl.int64)


@triton.jit
def _word_places(first, row_pairs, outputs, TILE: tl.constexpr, EPILOGUE: tl.constexpr):
    """The pointers to the words of each row of a tile. first: of row 0 of W."""
    places = (first + _row(0, TILE, outputs, EPILOGUE) * row_pairs,) * TILE
    for r in tl.static_range(1, TILE):
        places = _with(places, r, first + _row(r, TILE, outputs, EPILOGUE) * row_pairs)
    return places


@triton.jit
def _entry_place(first, row, number, between, blocks, scale_rows, SCALE_LAYOUT: tl.constexpr):
    """The pointer to entry `number` of the blocks' scales for a row of W. first: of row 0, entry 0."""
    return first + (row // scale_rows * blocks if SCALE_LAYOUT == BLOCKS else row + number * between)


@triton.jit
def _entry_places(
    first,
    between,
    blocks,
    scale_rows,
    outputs,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """The pointers to the scale entries of each row of a tile, ENTRIES per row."""
    row = _row(0, TILE, outputs, EPILOGUE)
    places = (_entry_place(first, row, 0, between, blocks, scale_rows, SCALE_LAYOUT),) * (TILE * ENTRIES)
    for n in tl.static_range(1, TILE * ENTRIES):
        row = _row(n // ENTRIES, TILE, outputs, EPILOGUE)
        place = _entry_place(first, row, n % ENTRIES, between, blocks, scale_rows, SCALE_LAYOUT)
        places = _with(places, n, place)
    return places


@triton.jit
def _load_all(places, offset, mask):
    """Load from each pointer of a tuple, `offset` further on."""
    found = (tl.load(places[0] + offset, mask=mask, other=0),)
    for number in tl.static_range(1, len(places)):
        found = found + (tl.load(places[number] + offset, mask=mask, other=0),)  # noqa: RUF005
    return found


@triton.jit
def _all_float16s(tile, ASM: tl.constexpr):
    """`_float16s` of each row: lower, upper, lower, upper, ..."""
    found = _float16s(tile[0], ASM)
    for r in tl.static_range(1, len(tile)):
        found = found + _float16s(tile[r], ASM)
    return found


@triton.jit
def _join(several, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Join COUNT tensors [m, n] of a tuple, STEP apart from FIRST on, into one: [m, n, 2, 2, ...]."""
    if COUNT == 1:
        joined = several[FIRST]
    else:
        even = _join(several, FIRST, 2 * STEP, COUNT // 2)
        joined = tl.join(even, _join(several, FIRST + STEP, 2 * STEP, COUNT // 2))
    return joined


@triton.jit(do_not_specialize=["rows"])
def vector_kernel(
    out,
    x,
    packed,
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
    VALUE_TYPE: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    POWER: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS_PER_STEP: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x W^T + bias with the EPILOGUE, one row of x per program. Grid: (tiles of W's rows, rows of x).

    Arguments as in weight_only.matmul_kernel; inputs must be even. BLOCKS_PER_STEP: blocks of each row of W per loop
    iteration. The next iteration's words are loaded before this iteration's are multiplied.
    """
    PAIRS: tl.constexpr = SPAN // 2
    FIELDS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = FIELDS * SPAN // GROUP
    SPANS: tl.constexpr = GROUP // SPAN
    ENTRIES: tl.constexpr = 1 if SCALE_LAYOUT == BLOCKS else GROUPS if ZERO_POINTS else GROUPS // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    CENTRE: tl.constexpr = 0.0 if ZERO_POINTS else 2.0 ** (BITS - 1)
    blocks = tl.cdiv(inputs, FIELDS * SPAN)
    block = tl.arange(0, BLOCKS_PER_STEP)
    pair = tl.arange(0, PAIRS)[None, :]
    step = tl.cast(block_stride // 2, tl.int64)
    packed_first = packed.to(tl.pointer_type(tl.int32)) + (block * step)[:, None] + pair
    between = outputs * 2 if EPILOGUE >= GATED else outputs
    entry_step = 1 if SCALE_LAYOUT == BLOCKS else between * ENTRIES
    places = _word_places(packed_first, row_stride // 2, outputs, TILE, EPILOGUE)
    tile = _load_all(places, 0, (block < blocks)[:, None])
    if SCALE_LAYOUT != OUTPUTS:
        entries_first = scales + block * entry_step
        entry_places = _entry_places(
            entries_first, between, blocks, scale_rows, outputs, TILE, ENTRIES, SCALE_LAYOUT, EPILOGUE
        )
        entries = _load_all(entry_places, 0, block < blocks)
    output, row = rows_of(TILE, outputs, EPILOGUE)
    row = tl.where(output < outputs, row, 0)
    if SCALE_LAYOUT == OUTPUTS:
        scale_of_row = tl.load(scales + row)
    column = block[:, None] * (FIELDS * PAIRS) + pair
    m = tl.program_id(1)
    x_place = x.to(tl.pointer_type(tl.int32)) + m.to(tl.int64) * (inputs // 2) + column
    wait(PDL)

    none = tl.zeros([BLOCKS_PER_STEP, PAIRS], tl.float32)
    totals = (none,) * TILE
    for start in range(0, blocks, BLOCKS_PER_STEP):
        more = start + BLOCKS_PER_STEP + block < blocks
        following = _load_all(places, (start + BLOCKS_PER_STEP) * step, more[:, None])
        if SCALE_LAYOUT != OUTPUTS:
            following_entries = _load_all(entry_places, (start + BLOCKS_PER_STEP) * entry_step, more)
        inside = (start + block < blocks)[:, None]
        if VALUE_TYPE == FLOAT8:
            numbers = _all_float16s(tile, ASM)
        for field in tl.static_range(FIELDS):
            if field % SPANS == 0:
                parts = totals if SCALE_LAYOUT == OUTPUTS else (none,) * TILE
                excess = none
                sums = none
            mask = (
                inside if WHOLE_BLOCKS else inside & (start * (FIELDS * PAIRS) + column + field * PAIRS < inputs // 2)
            )
            pairs = tl.load(x_place + field * PAIRS, mask=mask, other=0)
            left_x = _wide(pairs, 0, DTYPE, ASM)
            right_x = _wide(pairs, 1, DTYPE, ASM)
            if VALUE_TYPE != FLOAT8:
                both = left_x + right_x
                left_x *= _factor(BITS * field, BITS)
                right_x *= _factor(BITS * field + 16, BITS)
                excess += left_x + right_x + both * CENTRE
                if ZERO_POINTS:
                    sums += both
            for r in tl.static_range(TILE):
                if VALUE_TYPE == FLOAT8:
                    left = _wide(numbers[2 * r], field, tl.float16, ASM)
                    right = _wide(numbers[2 * r + 1], field, tl.float16, ASM)
                else:
                    fields = tile[r] ^ -0x7F7F7F80 if VALUE_TYPE == SIGNED else tile[r]  # sign bits flipped
                    left = _field(fields, BITS * field, BITS, ASM)
                    right = _field(fields, BITS * field + 16, BITS, ASM)
                parts = _with(parts, r, parts[r] + left * left_x + right * right_x)
            if field % SPANS == SPANS - 1:
                for r in tl.static_range(TILE):
                    part = parts[r]
                    if VALUE_TYPE != FLOAT8:
                        part -= excess
                    if SCALE_LAYOUT == GROUPS_OF_INPUTS:
                        entry = entries[r * ENTRIES + (field // SPANS if ZERO_POINTS else field // SPANS // 2)]
                        if ZERO_POINTS:
                            part += sums * (_wide(entry, 1, DTYPE, ASM) + POWER)[:, None]
                        part *= _wide(entry, 0 if ZERO_POINTS else field // SPANS % 2, SCALE_DTYPE, ASM)[:, None]
                    elif SCALE_LAYOUT == BLOCKS:
                        part *= entries[r][:, None]
                    totals = _with(totals, r, part if SCALE_LAYOUT == OUTPUTS else totals[r] + part)
        tile = following
        if SCALE_LAYOUT != OUTPUTS:
            entries = following_entries
        x_place += BLOCKS_PER_STEP * FIELDS * PAIRS
    release(PDL)  # see ops/common/launch.py
    total = tl.sum(tl.reshape(_join(totals, 0, 1, TILE), [BLOCKS_PER_STEP * PAIRS, TILE]), axis=0)
    if SCALE_LAYOUT == OUTPUTS:
        total *= scale_of_row
    store_vector(out, out, total, bias, output, row, m, rows, outputs, EPILOGUE, BIAS)
