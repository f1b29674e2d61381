"""Split-K reduction in Gluon: each program of a tile adds up the sums of its share of the tile's rows.

All programs that divide the inputs of a tile write their sums into a buffer of messages (ops/common/polling.py), and
each polls those of its share, also its own. No program reads the sums of a whole tile, as in split_k_polling.py, where
one does. Sums are added in a fixed order, so results do not depend on timing. All programs must run concurrently.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.common.polling import ALL_BITS, EMPTY, message
from engine.ops.gemm.stream_k import SUMS_PER_LINE, by_thread, offsets, to_rows


@gluon.jit
def send_sums(totals, buffer):
    """Write this program's sums of a tile.

    totals: the parts of the tile, each [rows, columns] float32, as wgmma holds them. buffer: [programs, parts, rows *
    columns] int32.
    """
    SIZE: gl.constexpr = totals[0].shape[0] * totals[0].shape[1]
    for part in gl.static_range(len(totals)):
        words = message(by_thread(totals[part]).to(gl.int32, bitcast=True))
        gl.store(buffer + (gl.program_id(0) * len(totals) + part) * SIZE + offsets(words), words)


@gluon.jit
def receive_sums(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr):
    """The sums over the SPLITS programs of this tile, of this program's share of its rows: [ROWS / SPLITS, COLUMNS].

    Programs of one tile have consecutive numbers. A share has at least SUMS_PER_LINE sums per warp, and 16 rows.
    """
    SHARE: gl.constexpr = ROWS // SPLITS
    SIZE: gl.constexpr = ROWS * COLUMNS
    LINES: gl.constexpr = SHARE * COLUMNS // SUMS_PER_LINE
    LAYOUT: gl.constexpr = gl.BlockedLayout([SPLITS, 1, 4], [1, 1, 32], [1, gl.num_warps(), 1], [2, 1, 0])
    PLANE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    line = gl.expand_dims(gl.arange(0, LINES, gl.SliceLayout(1, PLANE)), 1)
    lane = gl.expand_dims(gl.arange(0, SUMS_PER_LINE, gl.SliceLayout(0, PLANE)), 0)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    tile = gl.program_id(0) // SPLITS
    share = gl.program_id(0) % SPLITS
    begin = buffer + tile * (SPLITS * SIZE) + share * (SIZE // SPLITS)
    of_split = gl.expand_dims(gl.expand_dims(split, 1), 2) * SIZE
    place = begin + of_split + gl.expand_dims(line * SUMS_PER_LINE + lane, 0)
    words = gl.load(place, volatile=True)
    while gl.max(gl.max(gl.max(words.to(gl.uint32, bitcast=True), 2), 1), 0) == ALL_BITS:
        words = gl.load(place, volatile=True)
    gl.store(place, gl.full(words.shape, EMPTY, gl.int32, LAYOUT))
    return to_rows(gl.sum(words.to(gl.float32, bitcast=True), 0), SHARE, COLUMNS)
