"""Loads, operands and stores of the kernels for few rows of x, which multiply by mma.sync from registers.

See w4a16_few_rows.py.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.activation.act_and_mul import activate
from engine.ops.common.polling import ALL_BITS, EMPTY, message
from engine.ops.gemm.persistent_w4a16 import RUN, SPAN, row_of_lane
from engine.ops.gemm.skinny import GATED

COLUMNS = gl.constexpr(8)
"""Rows of x of the smallest tile, which are those of mma.sync."""


@gluon.jit
def left_of(pairs, FIELDS: gl.constexpr, LEFT: gl.constexpr, DTYPE: gl.constexpr):
    """Pairs of weights of FIELDS fields, [warps, rows, SPAN / 2 * FIELDS] int32 with fields innermost, as the left
    operand: a thread's 16 bytes are the operands of two products per field, one field after the other."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    parts = gl.reshape(both, [pairs.shape[0], pairs.shape[1], 2, 4, 2, 2, FIELDS, 2])
    ordered = gl.permute(parts, [0, 1, 2, 4, 6, 5, 3, 7])
    flat = gl.reshape(ordered, [pairs.shape[0], pairs.shape[1], SPAN * FIELDS])
    return gl.convert_layout(flat, LEFT, assert_trivial=True)


@gluon.jit
def right_of(pairs, FIELDS: gl.constexpr, RIGHT: gl.constexpr, DTYPE: gl.constexpr):
    """Pairs of inputs of FIELDS fields, [warps, SPAN / 2, columns * FIELDS] int32 with fields innermost, in the order
    of `left_of`: the right operand."""
    SIZE: gl.constexpr = pairs.shape[2] // FIELDS
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    parts = gl.reshape(both, [pairs.shape[0], 2, 4, 2, 2, SIZE, FIELDS, 2])
    ordered = gl.permute(parts, [0, 1, 3, 6, 4, 2, 7, 5])
    flat = gl.reshape(ordered, [pairs.shape[0], SPAN * FIELDS, SIZE])
    return gl.convert_layout(flat, RIGHT, assert_trivial=True)


@gluon.jit
def with_one(several, NUMBER: gl.constexpr, one):
    """The tuple `several` with element NUMBER replaced."""
    return several[:NUMBER] + (one,) + several[NUMBER + 1 :]  # noqa: RUF005 Triton knows no *several


@gluon.jit
def load_blocks(places, block, blocks, stride):
    """What is at `places` of block 0, of other blocks; 0 beyond the last. block: a number per warp, of places' rank."""
    return gl.load(places + block * stride, mask=block < blocks, other=0)


@gluon.jit
def places_in_x(
    x,
    rows,
    inputs,
    FIELDS: gl.constexpr,
    WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
    SIZE: gl.constexpr = COLUMNS,
    first_row=0,
):
    """Arguments of `load_x` for the first block of each warp: `warp`, `column`, `places` and `present`.

    x: [rows, inputs / 2] int32, contiguous. FIELDS: per block. LAYOUT: of [WARPS, SPAN / 2, SIZE]. SIZE: rows of x,
    from `first_row` on.
    """
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, SPAN // 2, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0), 1)
    m += first_row
    column = warp * (FIELDS * SPAN // 2) + k
    return warp, column, x + (m * (inputs // 2) + column), m < rows


@gluon.jit
def load_x(
    places,
    base,
    warp,
    column,
    present,
    blocks,
    inputs,
    FIELDS: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    WHOLE_BLOCKS: gl.constexpr,
):
    """The inputs of COUNT fields, from FIRST on, of a block per warp, from block `base` on: pairs as one int32.

    places: [warps, SPAN / 2, columns] pointers to x's inputs of field 0 of the first blocks, which are the pairs
    `column` of a row. present: which columns x has. FIELDS: weights per word, that is, spans per block."""
    found = ()
    for field in gl.static_range(FIRST, FIRST + COUNT):
        begin = (base * FIELDS + field) * (SPAN // 2)
        inside = base + warp < blocks if WHOLE_BLOCKS else begin + column < inputs // 2
        found = found + (gl.load(places + begin, mask=present & inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _offsets(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... in the shape [ROWS, COLUMNS] and a layout."""
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    return row * COLUMNS + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def send_sums(sums, buffer):
    """Write this program's sums of a tile. sums: [rows, COLUMNS] float32. buffer: the tile's, [SPLITS - 1, rows,
    COLUMNS] int32, indexed by program_id(1)."""
    ROWS: gl.constexpr = sums.shape[0]
    LAYOUT: gl.constexpr = sums.type.layout
    places = buffer + gl.program_id(1) * (ROWS * COLUMNS) + _offsets(ROWS, LAYOUT)
    gl.store(places, message(sums.to(gl.int32, bitcast=True)))


@gluon.jit
def receive_sums(buffer, ROWS: gl.constexpr, OTHERS: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for the sums of the OTHERS other programs of a tile, and add them up: [ROWS, COLUMNS] float32.

    As split_k_polling.poll_sums. buffer: as of `send_sums`. OTHERS: at least 1.
    """
    # No two threads poll the same place: one might see it EMPTY again.
    ROW_WARPS: gl.constexpr = min(gl.num_warps(), ROWS // 4)
    DEEP_WARPS: gl.constexpr = gl.num_warps() // ROW_WARPS
    POLLED: gl.constexpr = max(triton.next_power_of_2(OTHERS), DEEP_WARPS)
    DEEP: gl.constexpr = gl.BlockedLayout(
        [POLLED // DEEP_WARPS, 1, 1], [1, 4, 8], [DEEP_WARPS, ROW_WARPS, 1], [2, 1, 0]
    )
    PLANE: gl.constexpr = gl.SliceLayout(0, DEEP)
    number = gl.arange(0, POLLED, gl.SliceLayout(1, gl.SliceLayout(2, DEEP)))
    number = gl.expand_dims(gl.expand_dims(number, 1), 2)
    place = gl.expand_dims(_offsets(ROWS, PLANE), 0)
    places = buffer + number * (ROWS * COLUMNS) + place
    present = (number < OTHERS) & (place < ROWS * COLUMNS)
    words = gl.load(places, mask=present, other=0, volatile=True)
    while gl.max(gl.max(gl.max(words.to(gl.uint32, bitcast=True), 2), 1), 0) == ALL_BITS:
        words = gl.load(places, mask=present, other=0, volatile=True)
    gl.store(places, gl.full(words.shape, EMPTY, gl.int32, DEEP), mask=present)
    return gl.convert_layout(gl.sum(words.to(gl.float32, bitcast=True), 0), LAYOUT)


@gluon.jit
def store(out, total, bias, first, rows, weight_rows, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, first_row=0):
    """Apply bias and epilogue and store. total: [rows of W, rows of x] float32, from row `first` of the tiles and
    `first_row` of x on."""
    TILE: gl.constexpr = total.shape[0]
    SIZE: gl.constexpr = total.shape[1]
    if BIAS:
        lane = gl.arange(0, TILE, gl.SliceLayout(1, total.type.layout))
        row = row_of_lane(first, lane, weight_rows, EPILOGUE)
        total += gl.expand_dims(gl.load(bias + row).to(gl.float32), 1)
    if EPILOGUE >= GATED:
        outputs = weight_rows // 2
        begin = first // 2
        gate, up = total.reshape((TILE // (2 * RUN), 2, RUN, SIZE)).permute((0, 2, 3, 1)).split()
        value = activate(gate, up, EPILOGUE - GATED).reshape((TILE // 2, SIZE))
    else:
        outputs = weight_rows
        begin = first
        value = total
    output = gl.expand_dims(begin + gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout)), 1)
    m = first_row + gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, value.type.layout)), 0)
    gl.store(out + m * outputs + output, value.to(out.dtype.element_ty), mask=(output < outputs) & (m < rows))
