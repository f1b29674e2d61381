"""Turns packed 4-bit and 8-bit weights into 16-bit numbers, in registers.

A field becomes a number without a conversion instruction, which would take longer than reading the field. An integer's
bits are put below the exponent of a power of two (POWER) large enough that the last place is worth 1, and the power is
subtracted together with the zero point. Both steps are exact. Source: Kim et al., "Who Says Elephants Can't Run", 2022,
for float16. bfloat16 has no room for 8 bits there: see `unpack`. A float8's exponent and fraction bits are moved to
their places in the 16-bit type, and a multiplication corrects the exponent bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNSIGNED = tl.constexpr(0)
"""A field is an unsigned integer; the weight is the field minus the zero point."""
SIGNED = tl.constexpr(1)
"""A field is an int8: unsigned with a zero point of 128 if its sign bit is flipped; or its lower 7 bits, less 128 if
its sign bit is set."""
FLOAT8 = tl.constexpr(2)
"""A field is a float8 (e4m3)."""


@triton.jit
def fma(a, b, c):
    """a * b + c, two 16-bit numbers per instruction."""
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
def _insert(packed, SHIFT: tl.constexpr, MASK: tl.constexpr, CHANGE: tl.constexpr, DTYPE: tl.constexpr):
    """(word >> SHIFT & MASK) ^ CHANGE as a number, two words per instruction; MASK and CHANGE cover both."""
    bits = tl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK}, {CHANGE}, 0x6a; }}",
        "=r,r",
        [packed],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _float8(packed, J: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The fields J of a tile of words, float8 (e4m3), in DTYPE. Subnormals (below 2^-6) are exact; NaN is not kept."""
    if ASM:
        HALF: tl.constexpr = DTYPE.is_fp16()
        RIGHT: tl.constexpr = 1 if HALF else 4
        MASK: tl.constexpr = 0x3F803F80 if HALF else 0x07F007F0
        bits = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, s; shl.b32 t, $1, {8 - 8 * J}; and.b32 s, t, 0x80008000; shr.b32 t, t, {RIGHT};"
            f" lop3.b32 $0, t, {MASK}, s, 0xea; }}",
            "=r,r",
            [packed],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        BIAS: tl.constexpr = 256.0 if HALF else 2.0**120
        numbers = bits.to(DTYPE, bitcast=True)
        numbers = fma(numbers, tl.full(packed.shape, BIAS, DTYPE), tl.full(packed.shape, -0.0, DTYPE))
    else:
        byte = (packed.to(tl.int32) >> (8 * J)) & 0xFF
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        numbers = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(DTYPE)
    return numbers


@triton.jit
def unpack(
    packed,
    offset,
    J: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    POWER: tl.constexpr,
    ASM: tl.constexpr,
):
    """The fields J of a tile of words as numbers minus the zero point. offset: of the tile's shape and the result's
    dtype."""
    if VALUE_TYPE == FLOAT8:
        numbers = _float8(packed, J, offset.dtype, ASM)
    elif ASM:
        one = tl.full(packed.shape, 1.0, offset.dtype)
        if offset.dtype == tl.float16:
            MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
            CHANGE: tl.constexpr = 0x64806480 if VALUE_TYPE == SIGNED else 0x64006400
            numbers = fma(_insert(packed, BITS * J, MASK, CHANGE, tl.float16), one, offset)
        elif VALUE_TYPE == SIGNED:
            # (128 + the lower 7 bits) - (128 or, if the sign bit is set, 256)
            lower = _insert(packed, 8 * J, 0x007F007F, 0x43004300, tl.bfloat16)
            sign = _insert(packed, 8 * J, 0x00800080, 0x43004300, tl.bfloat16)
            numbers = fma(sign, tl.full(packed.shape, -1.0, tl.bfloat16), lower)
        else:
            numbers = fma(_insert(packed, BITS * J, 0x000F000F, 0x43004300, tl.bfloat16), one, offset)
            if BITS == 8:
                # The upper half of a field: 2048 + 16 * half. Minus 2176, 8 significant bits remain, as bfloat16 has.
                upper = _insert(packed, 8 * J + 4, 0x000F000F, 0x45004500, tl.bfloat16)
                numbers = fma(fma(upper, one, tl.full(packed.shape, -2176.0, tl.bfloat16)), one, numbers)
    else:
        field = (packed.to(tl.int32) >> (BITS * J)) & (2**BITS - 1)
        if VALUE_TYPE == SIGNED:
            field = field ^ 0x80
        numbers = (field.to(tl.float32) + (offset.to(tl.float32) + POWER)).to(offset.dtype)
    return numbers


@triton.jit
def half_of(entry, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The low or high 16 bits of int32 entries, as DTYPE."""
    return (entry >> (16 * HIGH)).to(tl.int16).to(DTYPE, bitcast=True)
