"""Unpacks 4-bit weights of experts from words of four, two words per instruction: see ops/experts/pack.py.

No weight takes a conversion instruction. The bits of an FP4 number (E2M1) are put where bfloat16 has its sign, the low
bits of its exponent and the high bit of its fraction. That number is 2^126 times too small, which the multiplication
by the scale corrects. An integer q is put below the exponent of 2^7 (float16: 2^10), which makes it 128 + q (1024 + q);
128 and the zero point are subtracted exactly, and the difference is multiplied by the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.experts.pack import BLOCK_INPUTS, FP4_FRACTIONS, FP4_SIGNS

BF16_FRACTION = 6
"""The bit of bfloat16 that is worth a half, the lowest of a field of kind fp4."""
BF16_SIGN = 15
_BLOCK = tl.constexpr(BLOCK_INPUTS)
_FRACTIONS = tl.constexpr(FP4_FRACTIONS)
_SIGNS = tl.constexpr(FP4_SIGNS)


@triton.constexpr_function
def fp4_code(field):
    """PTX that multiplies a field of two words, $1, by a pair of equal scales, $2."""
    left = BF16_FRACTION - FP4_FRACTIONS[field]
    code = f"shl.b32 f, $1, {left};" if left >= 0 else f"shr.b32 f, $1, {-left};"
    if left == BF16_SIGN - FP4_SIGNS[field]:
        code += "and.b32 f, f, 0x81C081C0;"
    else:
        code += f"shl.b32 s, $1, {BF16_SIGN - FP4_SIGNS[field]}; and.b32 f, f, 0x01C001C0;"
        code += "lop3.b32 f, s, 0x80008000, f, 0xEA;"
    # -0 as the addend keeps the sign of a zero.
    return f"{{ .reg .b32 f, s, zero; mov.b32 zero, 0x80008000; {code} fma.rn.bf16x2 $0, f, $2, zero; }}"


@triton.constexpr_function
def fp4_scale_code(field):
    """PTX of a pair of equal scales: a field's byte of an entry, $1, becomes the exponent of both halves of $0."""
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0, 0x{field}4{field}4; shr.b32 $0, t, 1; }}"


@triton.constexpr_function
def int4_scale_code(is_bf16):
    """PTX of a pair of equal scales, $0, and a pair of equal numbers to be added before, $1, of an entry, $2."""
    offset = "0xC300C300" if is_bf16 else "0xE400E400"
    return f"{{ .reg .b32 t; prmt.b32 $0, $2, 0, 0x1010; prmt.b32 t, $2, 0, 0x3232; or.b32 $1, t, {offset}; }}"


@triton.constexpr_function
def int4_code(field, is_bf16, added, scaled=True):
    """PTX that adds the pair of equal numbers of operand `added` to a field of two words, $1, and multiplies by the
    pair $2 if `scaled`."""
    dtype, power, one = ("bf16x2", "0x43004300", "0x3F803F80") if is_bf16 else ("f16x2", "0x64006400", "0x3C003C00")
    code = f"shr.b32 q, $1, {4 * field}; lop3.b32 q, q, 0x000F000F, {power}, 0xEA;"
    if scaled:
        code += f" fma.rn.{dtype} q, q, one, ${added}; fma.rn.{dtype} $0, q, $2, zero;"
    else:
        code += f" fma.rn.{dtype} $0, q, one, ${added};"
    return f"{{ .reg .b32 q, one, zero; mov.b32 one, {one}; mov.b32 zero, 0x80008000; {code} }}"


@triton.jit
def _fp4_pairs(words, entry, FIELD: tl.constexpr):
    """bfloat16 weights by PTX. The rest as in `_unpack_field`."""
    SCALE_CODE: tl.constexpr = fp4_scale_code(FIELD)
    scale = tl.inline_asm_elementwise(
        SCALE_CODE,
        "=r,r",
        [entry],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    CODE: tl.constexpr = fp4_code(FIELD)
    return tl.inline_asm_elementwise(
        CODE,
        "=r,r,r,r",
        [words, tl.broadcast_to(scale[:, None], words.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_pairs(words, entry, FIELD: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """Weights of DTYPE, bfloat16 or float16, by PTX. The rest as in `_unpack_field`."""
    SCALE_CODE: tl.constexpr = int4_scale_code(DTYPE.is_bf16())
    scale, offset = tl.inline_asm_elementwise(
        SCALE_CODE,
        "=r,=r,r",
        [entry],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    CODE: tl.constexpr = int4_code(FIELD, DTYPE.is_bf16(), 4, SCALED)
    bits = tl.inline_asm_elementwise(
        CODE,
        "=r,r,r,r,r,r",
        [words, tl.broadcast_to(scale[:, None], words.shape), tl.broadcast_to(offset[:, None], words.shape)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def int4_scale(entry, DTYPE: tl.constexpr):
    """The scales of entries of kind int4, for weights of DTYPE: float32."""
    return entry.to(tl.int16).to(tl.bfloat16 if DTYPE.is_bf16() else tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _unpack_field(
    words,
    entry,
    FIELD: tl.constexpr,
    FP4: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Weights of a field of words, in DTYPE; those of kind fp4 divided by the matrix's factor.

    words: [outputs, 32] int16; entry: [outputs] int32, from the scales of the field's group. The rest as in
    `unpack_block`.
    """
    if ASM:
        weights = _fp4_pairs(words, entry, FIELD) if FP4 else _int4_pairs(words, entry, FIELD, DTYPE, SCALED)
    elif FP4:
        bits = words.to(tl.int32)
        number = ((bits >> _FRACTIONS[FIELD] & 7) << 22) | ((bits >> _SIGNS[FIELD] & 1) << 31)
        scale = ((entry >> (8 * FIELD) & 0xFF) << 23).to(tl.float32, bitcast=True)
        weights = (number.to(tl.float32, bitcast=True) * scale[:, None]).to(DTYPE)
    else:
        q = (words.to(tl.int32) >> (4 * FIELD)) & 15
        weights = (q - (entry >> 16)[:, None]).to(tl.float32)
        if SCALED:
            weights *= int4_scale(entry, DTYPE)[:, None]
        weights = weights.to(DTYPE)
    return weights


@triton.jit
def unpack_block(
    words,
    scales,
    row,
    matrix_rows,
    FP4: tl.constexpr,
    ENTRIES: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The weights of a block in DTYPE, [outputs, 128]; those of kind fp4 divided by the matrix's factor.

    words: [outputs, 32] int16; scales: the block's, [ENTRIES, matrix_rows]; row: the outputs' rows in the matrix. ASM:
    PTX may be used, and DTYPE is bfloat16, or of kind int4 float16. SCALED: if not, weights of kind int4 are integers,
    less their zero points.
    """
    entry0 = tl.load(scales + row)
    entry1 = tl.load(scales + ENTRIES // 4 * matrix_rows + row)
    entry2 = tl.load(scales + ENTRIES // 2 * matrix_rows + row)
    entry3 = tl.load(scales + 3 * ENTRIES // 4 * matrix_rows + row)
    field0 = _unpack_field(words, entry0, 0, FP4, DTYPE, ASM, SCALED)
    field1 = _unpack_field(words, entry1, 1, FP4, DTYPE, ASM, SCALED)
    field2 = _unpack_field(words, entry2, 2, FP4, DTYPE, ASM, SCALED)
    field3 = _unpack_field(words, entry3, 3, FP4, DTYPE, ASM, SCALED)
    # Fields before words: in the layout of an operand of the tensor cores no weight moves between threads.
    fields = tl.permute(tl.join(tl.join(field0, field2), tl.join(field1, field3)), [0, 2, 3, 1])
    return tl.reshape(fields, [words.shape[0], _BLOCK])
