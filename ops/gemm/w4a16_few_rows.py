"""W4A16 GEMM in Gluon for few rows of x: x W^T, where the time is that of reading W.

The kernel computes tiles of the transposed result, W x^T, by mma.sync: weights are the left operand, rows of x the
columns of the right one. A thread loads 16 bytes of a row of W and of a row of x at a time, and these are its operands:
no data moves between threads, and none goes through shared memory. The order of the inputs within a block is permuted
for that, alike for W and x.

The warps of a program divide the inputs of its tile, or its rows, and add up their sums in the end; until then they do
not wait for each other. Each loads its first blocks of W, into registers, before it waits for the kernel that writes x.

W is in a GroupedLayout (packed_layout.py) of 4 bits and a span of 64. A pair of weights takes 2.25 instructions: a mask
leaves the bits of a field in the low byte of a 16-bit number, as which they are subnormal (of bfloat16, the first
normal numbers continue them evenly). A multiply-add scales the number and subtracts the scaled zero point, exactly.
Weights come out 2^EXPONENT times too small, as larger factors are beyond the type; the scales, in float32, make up for
it.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.ops.common.l1_cache import prefer_l1_cache
from engine.ops.common.launch import release, wait
from engine.ops.gemm.few_rows import left_of, load_blocks, load_x, places_in_x, right_of, store, with_one
from engine.ops.gemm.few_rows_tile import MAX_FEW_ROWS
from engine.ops.gemm.persistent_w4a16 import FIELDS, SPAN, half_of, row_of_lane


@gluon.constexpr_function
def _exponent(dtype):
    """Weights are this power of two too small, inverted."""
    return 6 if dtype == gl.bfloat16 else 9


@gluon.jit
def _centre(entry, shape: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, POWER: gl.constexpr):
    """The scaled zero points of entries of one group each, to be added: pairs of equal numbers, of a tile of words."""
    offset = gl.convert_layout(half_of(entry, 1, DTYPE), gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    # In float32, in which it is exact whatever the type.
    scaled = (offset.to(gl.float32) + POWER) * (2.0 ** -_exponent(DTYPE))
    bits = scaled.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return gl.expand_dims(bits | (bits << 16), 2) | gl.zeros(shape, gl.int32, LAYOUT)


@gluon.jit
def _weights(words, centre, FIELD: gl.constexpr, LEFT: gl.constexpr, DTYPE: gl.constexpr, ZERO_POINTS: gl.constexpr):
    """The fields FIELD of pairs of words less their zero points, 2^EXPONENT times too small: the left operand.

    words: [warps, rows, SPAN / 2] int32. centre: see `_centre`; read with ZERO_POINTS only, otherwise they are 8.
    """
    IS_BF16: gl.constexpr = _exponent(DTYPE) == 6
    KIND: gl.constexpr = "bf16x2" if IS_BF16 else "f16x2"
    MASK: gl.constexpr = "0x00F000F0" if FIELD % 2 else "0x000F000F"
    # 2^127 and 2^123 times 2^-133; 2^15 and 2^11 times 2^-24
    LOWER: gl.constexpr = "0x7F007F00" if IS_BF16 else "0x78007800"
    UPPER: gl.constexpr = "0x7D007D00" if IS_BF16 else "0x68006800"
    FACTOR: gl.constexpr = UPPER if FIELD % 2 else LOWER
    EIGHT: gl.constexpr = "0xBE00BE00" if IS_BF16 else "0xA400A400"  # -8 * 2^-EXPONENT
    ADDED: gl.constexpr = "mov.b32 o, $2" if ZERO_POINTS else f"mov.b32 o, {EIGHT}"
    pairs = gl.inline_asm_elementwise(
        f"{{ .reg .b32 t, f, o; shr.b32 t, $1, {FIELD // 2 * 8}; and.b32 t, t, {MASK}; mov.b32 f, {FACTOR}; {ADDED};"
        f" fma.rn.{KIND} $0, t, f, o; }}",
        "=r,r,r" if ZERO_POINTS else "=r,r",
        [words, centre] if ZERO_POINTS else [words],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return left_of(pairs, 1, LEFT, DTYPE)


@gluon.jit
def _load_entries(places, block, blocks, weight_rows, ENTRIES: gl.constexpr):
    """The entries of the scales of a block per warp."""
    stride = weight_rows * ENTRIES
    found = ()
    for number in gl.static_range(ENTRIES):
        entry = load_blocks(places + number * weight_rows, block, blocks, stride)
        found = found + (entry,)  # type: ignore[assignment]  # noqa: RUF005 Triton knows no *several
    return found


@gluon.jit
def _scale_of(entries, GROUP: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZERO_POINTS: gl.constexpr):
    """The scales of a group of a block, in float32."""
    if ZERO_POINTS:
        scale = half_of(entries[GROUP], 0, SCALE_DTYPE)
    else:
        scale = half_of(entries[GROUP // 2], GROUP % 2, SCALE_DTYPE)
    return scale.to(gl.float32)


def _name(variant: Any) -> str:
    """Name of a compiled variant, by which `prefer_l1_cache` finds it: only those for up to MAX_FEW_ROWS rows."""
    has_few_rows = variant.constants["COLUMNS"] <= MAX_FEW_ROWS and not variant.constants["SEVERAL"]
    return "w4a16_few_rows_kernel" if has_few_rows else "w4a16_more_rows_kernel"


@gluon.jit(do_not_specialize=["rows", "blocks"], repr=_name)
def w4a16_few_rows_kernel(
    out,
    x,
    packed,
    scales,
    bias,
    rows,
    weight_rows,
    inputs,
    blocks,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    POWER: gl.constexpr,
    ZERO_POINTS: gl.constexpr,
    WHOLE_BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """x W^T + bias with the EPILOGUE: [rows, outputs]. Grid: (tiles of W's rows, 1, tiles of x's rows).

    x: [rows, inputs / 2] int32, contiguous: pairs of numbers of out's dtype. packed: words of a GroupedLayout, in
    pairs: [blocks, weight_rows, SPAN / 2] int32. scales: [blocks, entries, weight_rows] int32, see GroupedLayout;
    GROUPS: groups per block. TILE: rows of W per program, a multiple of 16 * ROW_WARPS. AHEAD: blocks of a warp that
    are loaded before the first is multiplied. X_AHEAD: fields of x that are loaded ahead; 0: a block at a time, when
    needed. ROW_WARPS: warps that divide the rows and read the same x. COLUMNS: rows of x per program, a multiple of 8.
    SEVERAL: whether x has more rows than that. POWER: see GroupedLayout.power. WHOLE_BLOCKS: inputs fill all blocks.
    """
    WARPS: gl.constexpr = gl.num_warps() // ROW_WARPS
    DTYPE: gl.constexpr = out.dtype.element_ty
    ENTRIES: gl.constexpr = GROUPS if ZERO_POINTS else GROUPS // 2
    X_FIELDS: gl.constexpr = X_AHEAD if X_AHEAD else FIELDS
    PER_GROUP: gl.constexpr = FIELDS // GROUPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, ROW_WARPS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    first = gl.program_id(0) * TILE
    first_row = gl.program_id(2) * COLUMNS if SEVERAL else 0

    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))), 1), 2)
    row = row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), weight_rows, EPILOGUE)
    pair = gl.arange(0, SPAN // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    in_block = gl.expand_dims(gl.expand_dims(row, 0), 2).to(gl.int64) * (SPAN // 2)
    word_places = packed + in_block + gl.expand_dims(gl.expand_dims(pair, 0), 1)
    block_words = weight_rows.to(gl.int64) * (SPAN // 2)
    scale_warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1)
    lane = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    entry_places = scales + gl.expand_dims(row_of_lane(first, lane, weight_rows, EPILOGUE), 0)
    words = ()
    entries = ()
    for number in gl.static_range(AHEAD):
        loaded = load_blocks(word_places, warp + number * WARPS, blocks, block_words)
        words = words + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        several = _load_entries(entry_places, scale_warp + number * WARPS, blocks, weight_rows, ENTRIES)
        entries = entries + (several,)  # type: ignore[assignment]  # noqa: RUF005

    x_warp, column, x_places, present = places_in_x(x, rows, inputs, FIELDS, WARPS, X, COLUMNS, first_row)
    none = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
    total = none
    wait(PDL)
    if X_AHEAD:
        coming = load_x(x_places, 0, x_warp, column, present, blocks, inputs, FIELDS, 0, X_AHEAD, WHOLE_BLOCKS)
    steps = gl.cdiv(blocks, WARPS * AHEAD)
    for step in range(steps):
        if step == steps - 1:
            release(PDL)  # all loads of W are in progress
        for number in gl.static_range(AHEAD):
            base = (step * AHEAD + number) * WARPS
            if X_AHEAD == 0:
                pairs = load_x(x_places, base, x_warp, column, present, blocks, inputs, FIELDS, 0, FIELDS, WHOLE_BLOCKS)
            for group in gl.static_range(GROUPS):
                part = none
                if ZERO_POINTS:
                    centre = _centre(entries[number][group], words[number].shape, WORDS, DTYPE, POWER)
                else:
                    centre = none  # not read
                for field in gl.static_range(PER_GROUP * group, PER_GROUP * (group + 1)):
                    if X_AHEAD and field % X_AHEAD == 0:
                        pairs = coming
                        coming = load_x(
                            x_places, base + WARPS * ((field + X_AHEAD) // FIELDS), x_warp, column, present, blocks,
                            inputs, FIELDS, (field + X_AHEAD) % FIELDS, X_AHEAD, WHOLE_BLOCKS,
                        )  # fmt: skip
                    weights = _weights(words[number], centre, field, LEFT, DTYPE, ZERO_POINTS)
                    part = mma_v2(weights, right_of(pairs[field % X_FIELDS], 1, RIGHT, DTYPE), part)
                scale = _scale_of(entries[number], group, SCALE_DTYPE, ZERO_POINTS) * (2.0 ** _exponent(DTYPE))
                total += part * gl.expand_dims(scale, 2)
            later = base + AHEAD * WARPS
            words = with_one(words, number, load_blocks(word_places, warp + later, blocks, block_words))
            several = _load_entries(entry_places, scale_warp + later, blocks, weight_rows, ENTRIES)
            entries = with_one(entries, number, several)
    store(out, gl.sum(total, axis=0), bias, first, rows, weight_rows, EPILOGUE, BIAS, first_row)


# Programs on the same multiprocessor read the same x. Variants for more rows of x have another name: they run next to
# kernels with much shared memory, where changing the size of the L1 cache takes longer than it saves.
prefer_l1_cache(w4a16_few_rows_kernel)
