"""Loads and products of the kernels for the experts of few tokens (few_tokens.py), by format of the weights.

A warp multiplies one block at a time: WORDS_PER_BLOCK words of 32 bits of each row of W in its tile. It uses mma.sync
with operands in registers, as the kernels for linear layers of few rows (ops/gemm/few_rows.py). The inputs within a
block are permuted, in W and x alike, such that the 16 bytes that a thread loads of a row of W are its operands.

Weights of 8 bits are in the order of the matrix; pairs of them are converted as in ops/gemm/w8a16_few_rows.py. Those of
4 bits are packed (ops/experts/pack.py) and unpacked as in ops/experts/unpack.py: scaled, and rounded once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.ops.experts.unpack import fp4_code, fp4_scale_code, int4_code, int4_scale_code
from engine.ops.gemm.few_rows import COLUMNS, left_of, right_of

PLAIN = gl.constexpr(0)
FLOAT8 = gl.constexpr(1)
FP4 = gl.constexpr(2)
INT4 = gl.constexpr(3)
KINDS = {"plain": PLAIN, "float8": FLOAT8, "fp4": FP4, "int4": INT4}
WORDS_PER_BLOCK = gl.constexpr(32)
"""Words of 32 bits of a row of W that a warp loads at a time: 64, 128 or 256 inputs of 16, 8 or 4 bits."""
HALF = gl.constexpr(16)
"""Words per row of a block of ops/experts/pack.py, of which two are a block here."""


@gluon.constexpr_function
def pairs_per_block(kind):
    """Pairs of inputs in a block."""
    return {0: 32, 1: 64, 2: 128, 3: 128}[kind]


@gluon.constexpr_function
def x_fields(kind):
    """Number of tensors in which the inputs of a block are loaded: one per field of a word of 4-bit weights."""
    return 4 if kind >= 2 else 1


@gluon.jit
def _float8_as_left(words, LEFT: gl.constexpr, DTYPE: gl.constexpr):
    """Weights in float8 as the left operand, in bfloat16. words: [warps, rows, WORDS_PER_BLOCK] int32."""
    first, second = gl.inline_asm_elementwise(
        "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, i; mov.b32 {l, h}, $2;"
        " cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;"
        " mov.b32 {a, b}, p; mov.b32 {c, d}, q; cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c;"
        " cvt.f32.f16 i, d; cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, i, g; }",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.reshape(gl.join(first, second), [words.shape[0], words.shape[1], 2 * WORDS_PER_BLOCK])
    return left_of(pairs, 2, LEFT, DTYPE)


@gluon.jit
def _wide_right(pairs, RIGHT: gl.constexpr, DTYPE: gl.constexpr):
    """Pairs of inputs of a block of float8 weights, [warps, 64, COLUMNS] int32, in the order of `_float8_as_left`."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    parts = gl.reshape(both, [pairs.shape[0], 2, 4, 2, 2, 2, COLUMNS, 2])
    ordered = gl.permute(parts, [0, 1, 3, 5, 4, 2, 7, 6])
    flat = gl.reshape(ordered, [pairs.shape[0], 4 * WORDS_PER_BLOCK, COLUMNS])
    return gl.convert_layout(flat, RIGHT, assert_trivial=True)


@gluon.jit
def _halves(entry, words):
    """Repeat a number per half of a block, entry: [warps, rows, 2], for each word of the half: the shape of `words`."""
    shape: gl.constexpr = [words.shape[0], words.shape[1], 2, HALF]
    spread = gl.expand_dims(entry, 3) + gl.zeros_like(gl.reshape(words, shape))
    LAYOUT: gl.constexpr = words.type.layout
    return gl.convert_layout(gl.reshape(spread, words.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _field_as_left(words, entry, FIELD: gl.constexpr, KIND: gl.constexpr, LEFT: gl.constexpr, DTYPE: gl.constexpr):
    """A field of 4-bit weights, scaled, as the left operand. words: [warps, rows, WORDS_PER_BLOCK] int32. entry:
    [warps, rows, 2] int32, the scales of the two blocks of ops/experts/pack.py."""
    if KIND == FP4:
        FP4_SCALE: gl.constexpr = fp4_scale_code(FIELD)
        scale = gl.inline_asm_elementwise(
            FP4_SCALE,
            "=r,r",
            [entry],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        CODE: gl.constexpr = fp4_code(FIELD)
        given = [words, _halves(scale, words)]
        weights = gl.inline_asm_elementwise(CODE, "=r,r,r", given, dtype=gl.int32, is_pure=True, pack=1)
    else:
        INT4_SCALE: gl.constexpr = int4_scale_code(True)
        scale, offset = gl.inline_asm_elementwise(
            INT4_SCALE,
            "=r,=r,r",
            [entry],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        INT4_CODE: gl.constexpr = int4_code(FIELD, True, 3)
        given = [words, _halves(scale, words), _halves(offset, words)]
        weights = gl.inline_asm_elementwise(INT4_CODE, "=r,r,r,r", given, dtype=gl.int32, is_pure=True, pack=1)
    return left_of(weights, 1, LEFT, DTYPE)


@gluon.jit
def add_products(
    total,
    words,
    entry,
    inputs,
    KIND: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """total + W x^T over one block per warp: [warps, rows, COLUMNS] float32.

    words, entry, inputs: what load_words, load_entry and load_inputs return.
    """
    if KIND == PLAIN:
        total = mma_v2(left_of(words, 1, LEFT, DTYPE), right_of(inputs[0], 1, RIGHT, DTYPE), total)
    elif KIND >= FP4:
        for field in gl.static_range(4):
            w = _field_as_left(words, entry, field, KIND, LEFT, DTYPE)
            total = mma_v2(w, right_of(inputs[field], 1, RIGHT, DTYPE), total)
    elif SCALE_ROWS:
        LAYOUT: gl.constexpr = total.type.layout
        none = gl.zeros(total.shape, gl.float32, LAYOUT)
        part = mma_v2(_float8_as_left(words, LEFT, DTYPE), _wide_right(inputs[0], RIGHT, DTYPE), none)
        total += part * gl.expand_dims(entry, 2)
    else:
        total = mma_v2(_float8_as_left(words, LEFT, DTYPE), _wide_right(inputs[0], RIGHT, DTYPE), total)
    return total


@gluon.jit
def word_offsets(row, k, weight_rows, row_words, KIND: gl.constexpr):
    """Where the words of block 0 are in the matrix of an expert, in words. row: [1, rows, 1]; k: [1, 1, words]."""
    offsets = row * row_words + k
    if KIND >= FP4:
        offsets = (k // HALF) * (weight_rows * HALF) + row * HALF + k % HALF
    return offsets


@gluon.jit
def load_words(places, base, block, k, weight_rows, row_words, blocks, valid, KIND: gl.constexpr):
    """The words of one block of W per warp, [warps, rows, WORDS_PER_BLOCK] int32; 0 beyond the last block and where
    `valid` is false. places: pointers to the words of block 0. base + block: the number of each warp's block."""
    number = base + block
    if KIND >= FP4:
        inside = 2 * number + k // HALF < blocks
        offset = number * (2 * HALF * weight_rows)
    else:
        inside = number * WORDS_PER_BLOCK + k < row_words
        offset = number * WORDS_PER_BLOCK
    return gl.load(places + offset, mask=inside & valid, other=0)


@gluon.jit
def load_entry(
    scales,
    matrix,
    base,
    block,
    half,
    row,
    weight_rows,
    blocks,
    valid,
    KIND: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
):
    """The scales of one block of W per warp; 0 where load_words returns 0.

    In 4 bits one entry per half of the block, [warps, rows, 2] int32; in float8 with SCALE_ROWS [warps, rows] float32.
    Other formats have no scales per block: the result is not used. matrix: number of the expert, int64.
    """
    found = base  # not used
    if KIND >= FP4:
        number = 2 * (base + block) + half
        places = scales + matrix * (blocks.to(gl.int64) * weight_rows) + row
        found = gl.load(places + number * weight_rows, mask=(number < blocks) & valid, other=0)
    elif SCALE_ROWS:
        number = base + block
        scale_rows = (weight_rows + SCALE_ROWS - 1) // SCALE_ROWS
        place = scales + matrix * (scale_rows.to(gl.int64) * blocks) + row // SCALE_ROWS * blocks + number
        found = gl.load(place, mask=(number < blocks) & valid, other=0.0)
    return found


@gluon.jit
def load_inputs(places, base, block, k, pairs, present, KIND: gl.constexpr):
    """The inputs of one block per warp as pairs in int32, a tuple of x_fields; 0 beyond the last input and where
    `present` is false. places: pointers to the beginnings of rows of x. pairs: of inputs in a row of x."""
    found = ()
    for field in gl.static_range(x_fields(KIND)):
        if KIND >= FP4:
            pair = (base + block) * pairs_per_block(KIND) + (k // HALF) * (4 * HALF) + field * HALF + k % HALF
        else:
            pair = (base + block) * pairs_per_block(KIND) + k
        found = found + (gl.load(places + pair, mask=present & (pair < pairs), other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found
