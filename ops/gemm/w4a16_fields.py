"""Unpacks 4-bit weights in Gluon, in registers, as the left operand of wgmma: scaled, and rounded once.

The weights are in a GroupedLayout (packed_layout.py) of 4 bits and a span of 64. ldmatrix gives a thread pairs of
words; each holds four pairs of weights, and a pair of weights is an operand register of wgmma: no data moves between
threads.

In bfloat16 without zero points a pair of weights takes 2.25 instructions: a mask, a multiply-add, and a quarter of a
shift. The mask leaves the bits of a field in the low byte of a bfloat16. As a subnormal number (the first normal
numbers continue them evenly) it is worth the field times 2^-133, or 2^-129 where it is the upper half of the byte. The
multiply-add scales it and subtracts the scaled zero point, 8 times the scale; both are exact before the sum is rounded.
As 2^133 is beyond bfloat16, weights come out 2^EXPONENT times too small, and sums of products are raised in the end.

Otherwise a pair takes up to four instructions, as in persistent_w4a16.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.gemm.persistent_w4a16 import FIELDS, half_of, spread, weights_of_field

EXPONENT = gl.constexpr(32)
"""See the module. Small enough for scales up to 2^26, the largest of float16 included."""


@gluon.jit
def _scale_and_add(words, factor, offset, FIELD: gl.constexpr):
    """Field FIELD of the words, read as a subnormal bfloat16, times factor plus offset."""
    MASK: gl.constexpr = "0x00F000F0" if FIELD % 2 else "0x000F000F"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shr.b32 t, $1, {FIELD // 2 * 8}; and.b32 t, t, {MASK}; fma.rn.bf16x2 $0, t, $2, $3; }}",
        "=r,r,r,r",
        [words, factor, offset],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def lowered(dtype, zero_points):
    """Whether weights of this dtype are 2^EXPONENT times too small."""
    return dtype == gl.bfloat16 and not zero_points


@gluon.jit
def weights_of(
    words,
    entries,
    FIELD: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
):
    """The fields FIELD of a tile of words as scaled weights, in DTYPE; see `lowered`.

    GROUPS: groups per block. POWER: see GroupedLayout.power.
    """
    if lowered(DTYPE, ZERO_POINTS):
        GROUP: gl.constexpr = FIELD * GROUPS // FIELDS
        LAYOUT: gl.constexpr = words.type.layout
        scale = half_of(entries[GROUP // 2], GROUP % 2, SCALE_DTYPE).to(DTYPE)
        factor = spread(scale * (2.0 ** (133 - EXPONENT - 4 * (FIELD % 2))), words.shape, LAYOUT)
        # In float32, as Triton 3.6 makes such small constants of bfloat16 zero.
        zero_point = (scale.to(gl.float32) * (-8.0 * 2.0**-EXPONENT)).to(DTYPE)
        weights = _scale_and_add(words, factor, spread(zero_point, words.shape, LAYOUT), FIELD)
    else:
        weights = weights_of_field(words, entries, FIELD, GROUPS, SCALE_DTYPE, DTYPE, POWER, ZERO_POINTS)
    return weights
