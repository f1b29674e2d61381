"""Skinny GEMM by tensor cores in Gluon, for up to 8 rows of x: x W^T of 16-bit W, for small W.

As w8a16_few_rows.py, of weights that need no conversion: a thread's 16 bytes of a row of W and 16 bytes of a row of x
are its operands of two products. Loads of W up to AHEAD blocks per warp are in progress before x is there, which are
all loads of a small W.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.ops.common.l1_cache import prefer_l1_cache
from engine.ops.common.launch import release, wait
from engine.ops.gemm.few_rows import COLUMNS, left_of, load_x, places_in_x, right_of, store, with_one
from engine.ops.gemm.persistent_w4a16 import SPAN, row_of_lane

X_AHEAD = gl.constexpr(2)
"""Blocks of x that are loaded ahead of those being multiplied."""


@gluon.jit
def _load_weights(places, base, warp, column, blocks, inputs, WHOLE_BLOCKS: gl.constexpr):
    """A block of W per warp, from block `base` on, 0 beyond the last. places: pointers to the warps' first blocks,
    which are the pairs `column` of a row."""
    begin = base * (SPAN // 2)
    inside = base + warp < blocks if WHOLE_BLOCKS else begin + column < inputs // 2
    return gl.load(places + begin, mask=inside, other=0)


@gluon.jit(do_not_specialize=["rows", "blocks"])
def w16_few_rows_kernel(
    out,
    x,
    weight,
    bias,
    rows,
    weight_rows,
    inputs,
    blocks,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    WHOLE_BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: tiles of W's rows.

    x: [rows, inputs / 2] int32: pairs of numbers of out's dtype; at most COLUMNS rows. weight: [weight_rows,
    inputs / 2] int32. Both are contiguous. blocks: of SPAN inputs, which the warps divide. TILE: rows of W per program,
    a multiple of 16. AHEAD: blocks of a warp that are loaded before the first is multiplied, a multiple of X_AHEAD.
    WHOLE_BLOCKS: inputs fill all blocks.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = out.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    first = gl.program_id(0) * TILE

    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))), 1), 2)
    row = row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), weight_rows, EPILOGUE)
    pair = gl.arange(0, SPAN // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    pair_of_row = warp * (SPAN // 2) + gl.expand_dims(gl.expand_dims(pair, 0), 1)
    in_matrix = gl.expand_dims(gl.expand_dims(row, 0), 2).to(gl.int64) * (inputs // 2)
    places = weight + in_matrix + pair_of_row
    words = ()
    for number in gl.static_range(AHEAD):
        loaded = _load_weights(places, number * WARPS, warp, pair_of_row, blocks, inputs, WHOLE_BLOCKS)
        words = words + (loaded,)  # type: ignore[assignment]  # noqa: RUF005 Triton knows no *several

    x_warp, column, x_places, present = places_in_x(x, rows, inputs, 1, WARPS, X)
    total = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
    wait(PDL)
    coming = ()
    for number in gl.static_range(X_AHEAD):
        fields = load_x(x_places, number * WARPS, x_warp, column, present, blocks, inputs, 1, 0, 1, WHOLE_BLOCKS)
        coming = coming + (fields,)  # type: ignore[assignment]  # noqa: RUF005
    steps = gl.cdiv(blocks, WARPS * AHEAD)
    for step in range(steps):
        if step == steps - 1:
            release(PDL)  # all loads of W are in progress
        for number in gl.static_range(AHEAD):
            base = (step * AHEAD + number) * WARPS
            pairs = coming[number % X_AHEAD]  # type: ignore[var-annotated]
            fields = load_x(
                x_places, base + X_AHEAD * WARPS, x_warp, column, present, blocks, inputs, 1, 0, 1, WHOLE_BLOCKS
            )
            coming = with_one(coming, number % X_AHEAD, fields)
            total = mma_v2(left_of(words[number], 1, LEFT, DTYPE), right_of(pairs[0], 1, RIGHT, DTYPE), total)
            later = base + AHEAD * WARPS
            loaded = _load_weights(places, later, warp, pair_of_row, blocks, inputs, WHOLE_BLOCKS)
            words = with_one(words, number, loaded)
    store(out, gl.sum(total, axis=0), bias, first, rows, weight_rows, EPILOGUE, BIAS)


# Programs on the same multiprocessor read the same x.
prefer_l1_cache(w16_few_rows_kernel)
