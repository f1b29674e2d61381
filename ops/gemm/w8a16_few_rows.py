"""W8A16 GEMM in Gluon for up to 8 rows of x: x W^T, of float8 (e4m3) or int8 weights with a scale per row of W.

As w4a16_few_rows.py, for a W8Layout (packed_layout.py). All weights are exact, so that results differ from those of
other kernels only in the order of sums. A pair of weights takes four instructions in float8 (two in float16), of which
two are conversions, and 2.5 in int8. The scales, in float32, make up for int8 weights that are 2^EXPONENT times too
small.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.ops.common.l1_cache import prefer_l1_cache
from engine.ops.common.launch import release, wait
from engine.ops.gemm.few_rows import (
    COLUMNS,
    left_of,
    load_blocks,
    load_x,
    places_in_x,
    receive_sums,
    right_of,
    send_sums,
    store,
    with_one,
)
from engine.ops.gemm.persistent_w4a16 import SPAN, row_of_lane

FIELDS = gl.constexpr(2)
"""Weights per word."""


@gluon.constexpr_function
def _exponent(dtype, is_float8):
    """The power of two by which converted weights are too small."""
    if is_float8:
        return 0
    return 6 if dtype == gl.bfloat16 else 9


@gluon.constexpr_function
def _conversion(dtype, is_float8):
    """PTX that converts four weights, two words in one register $2, into pairs of fields: $0 of the lower fields, $1 of
    the upper ones."""
    is_bf16 = dtype == gl.bfloat16
    if not is_float8:
        # A field with its sign bit flipped, as a subnormal: q + 128 times 2^-133 or 2^-24. Less 128, scaled.
        kind = "bf16x2" if is_bf16 else "f16x2"
        factor, offset = ("0x7F007F00", "0xC000C000") if is_bf16 else ("0x78007800", "0xB400B400")
        return (
            "{ .reg .b32 l, h, f, o; lop3.b32 l, $2, 0x00FF00FF, 0x00800080, 0x6a; shr.b32 h, $2, 8;"
            " lop3.b32 h, h, 0x00FF00FF, 0x00800080, 0x6a;"
            f" mov.b32 f, {factor}; mov.b32 o, {offset}; fma.rn.{kind} $0, l, f, o; fma.rn.{kind} $1, h, f, o; }}"
        )
    halves = "mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;"
    if not is_bf16:
        return f"{{ .reg .b16 l, h; .reg .b32 p, q; {halves} prmt.b32 $0, p, q, 0x5410; prmt.b32 $1, p, q, 0x7632; }}"
    return (
        f"{{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, i; {halves}"
        " mov.b32 {a, b}, p; mov.b32 {c, d}, q; cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c;"
        " cvt.f32.f16 i, d; cvt.rn.bf16x2.f32 $0, g, e; cvt.rn.bf16x2.f32 $1, i, f; }"
    )


@gluon.jit
def _numbers(words, DTYPE: gl.constexpr, IS_FLOAT8: gl.constexpr):
    """Words in pairs, int32 -> the weights of each field, in pairs of DTYPE as int32."""
    return gl.inline_asm_elementwise(
        _conversion(DTYPE, IS_FLOAT8), "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _innermost(fields):
    """Two tensors of the same shape -> one, in which their elements alternate along the last axis."""
    shape: gl.constexpr = fields[0].shape[:-1] + [2 * fields[0].shape[-1]]  # noqa: RUF005 Triton knows no *several
    return gl.reshape(gl.join(fields[0], fields[1]), shape)


@gluon.jit(do_not_specialize=["rows", "blocks"])
def w8a16_few_rows_kernel(
    out,
    x,
    packed,
    scales,
    bias,
    polled_sums,
    rows,
    weight_rows,
    inputs,
    blocks,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    SPLITS: gl.constexpr,
    IS_FLOAT8: gl.constexpr,
    WHOLE_BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: (tiles of W's rows, SPLITS).

    x: [rows, inputs / 2] int32, contiguous: pairs of numbers of out's dtype; at most COLUMNS rows. packed: words of a
    W8Layout, in pairs: [weight_rows, blocks, SPAN / 2] int32. scales: [weight_rows] float32. TILE, AHEAD,
    ROW_WARPS, WHOLE_BLOCKS: as of w4a16_few_rows_kernel. X_AHEAD: as there, an even number of fields, which divides
    those of AHEAD blocks. SPLITS: programs that divide the inputs of a tile; each has some. polled_sums: [tiles,
    SPLITS - 1, TILE, COLUMNS] int32, EMPTY before and after (ops/common/polling.py).
    """
    WARPS: gl.constexpr = gl.num_warps() // ROW_WARPS
    DTYPE: gl.constexpr = out.dtype.element_ty
    X_BLOCKS: gl.constexpr = X_AHEAD // FIELDS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, ROW_WARPS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    first = gl.program_id(0) * TILE
    origin = 0
    end = blocks
    inputs_end = inputs
    if SPLITS > 1:
        share = gl.cdiv(blocks, SPLITS)
        origin = gl.program_id(1) * share
        end = gl.minimum(origin + share, blocks)
        inputs_end = gl.minimum(inputs, end * (FIELDS * SPAN))

    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))), 1), 2)
    row = row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), weight_rows, EPILOGUE)
    pair = gl.arange(0, SPAN // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    in_matrix = gl.expand_dims(gl.expand_dims(row, 0), 2).to(gl.int64) * (blocks * (SPAN // 2))
    word_places = packed + in_matrix + gl.expand_dims(gl.expand_dims(pair, 0), 1)
    words = ()
    for number in gl.static_range(AHEAD):
        loaded = load_blocks(word_places, warp + (origin + number * WARPS), end, SPAN // 2)
        words = words + (loaded,)  # type: ignore[assignment]  # noqa: RUF005 Triton knows no *several
    lane = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    scale = gl.load(scales + row_of_lane(first, lane, weight_rows, EPILOGUE)) * (2.0 ** _exponent(DTYPE, IS_FLOAT8))

    x_warp, column, x_places, present = places_in_x(x, rows, inputs, FIELDS, WARPS, X)
    total = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
    wait(PDL)
    coming = ()
    for number in gl.static_range(X_BLOCKS):
        fields = load_x(
            x_places, origin + number * WARPS, x_warp, column, present, end, inputs_end, FIELDS, 0, FIELDS, WHOLE_BLOCKS
        )
        coming = coming + (fields,)  # type: ignore[assignment]  # noqa: RUF005
    steps = gl.cdiv(end - origin, WARPS * AHEAD)
    for step in range(steps):
        if step == steps - 1:
            release(PDL)  # all loads of W are in progress
        for number in gl.static_range(AHEAD):
            base = origin + (step * AHEAD + number) * WARPS
            if X_BLOCKS:
                pairs = coming[number % X_BLOCKS]  # type: ignore[var-annotated]
                fields = load_x(
                    x_places, base + X_BLOCKS * WARPS, x_warp, column, present, end, inputs_end, FIELDS, 0, FIELDS,
                    WHOLE_BLOCKS,
                )  # fmt: skip
                coming = with_one(coming, number % X_BLOCKS, fields)
            else:
                pairs = load_x(
                    x_places, base, x_warp, column, present, end, inputs_end, FIELDS, 0, FIELDS, WHOLE_BLOCKS
                )
            numbers = _numbers(words[number], DTYPE, IS_FLOAT8)
            total = mma_v2(
                left_of(_innermost(numbers), FIELDS, LEFT, DTYPE),
                right_of(_innermost(pairs), FIELDS, RIGHT, DTYPE),
                total,
            )
            later = warp + (base + AHEAD * WARPS)
            words = with_one(words, number, load_blocks(word_places, later, end, SPAN // 2))
    sums = gl.sum(total, axis=0) * gl.expand_dims(scale, 1)
    if SPLITS > 1:
        buffer = polled_sums + gl.program_id(0) * ((SPLITS - 1) * TILE * COLUMNS)
        if gl.program_id(1) < SPLITS - 1:
            send_sums(sums, buffer)
        else:
            LAYOUT: gl.constexpr = sums.type.layout
            sums += receive_sums(buffer, TILE, SPLITS - 1, LAYOUT)
            store(out, sums, bias, first, rows, weight_rows, EPILOGUE, BIAS)
    else:
        store(out, sums, bias, first, rows, weight_rows, EPILOGUE, BIAS)


# Programs on the same multiprocessor read the same x.
prefer_l1_cache(w8a16_few_rows_kernel)
