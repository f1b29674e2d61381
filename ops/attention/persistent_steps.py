"""Parts of the persistent prefill kernels: work items, copies, ranges of keys, masks, softmax, results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.attention.common import capped, score_factor
from engine.ops.common import gluon_copies

RUN = 8
"""Keys that are contiguous in the cache; block_size is a multiple."""
_RUN = gl.constexpr(RUN)
_COPIED_ROWS = gl.constexpr(32)  # rows of queries per copy, so that addresses fit into registers


@gluon.jit
def item_of_turn(turn, programs):
    """The work item (a tile and a KV head) that this program processes in its `turn`.

    Items with the most work come first, so programs take items in order and then in reverse, for equal shares.
    """
    me = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, me, programs - 1 - me)


@gluon.jit
def count_turns(items, programs):
    """The number of work items that this program processes."""
    turns = gl.cdiv(items, programs)
    return gl.where(item_of_turn(turns - 1, programs) < items, turns, turns - 1)


@gluon.jit
def ordered_item(order, turn, items, programs):
    """As item_of_turn, by `order` if it is not None; `items` behind the last turn."""
    if order is None:
        item = item_of_turn(turn, programs)
    else:
        at = order + turn * programs + gl.program_id(0)
        item = gl.load(at, mask=turn < gl.cdiv(items, programs), other=items)
    return item


@gluon.jit
def ordered_turns(order, items, programs):
    """As count_turns, by `order` if it is not None."""
    turns = gl.cdiv(items, programs)
    return gl.where(ordered_item(order, turns - 1, items, programs) < items, turns, turns - 1)


@gluon.jit
def tile_of_item(tiles, item, items, KV_HEADS: gl.constexpr):
    """Sequence of an item, position and row of q of its first token, and number of tokens."""
    tile = tiles + item // KV_HEADS * 4
    inside = item < items
    sequence = gl.load(tile, mask=inside, other=0)
    first_position = gl.load(tile + 1, mask=inside, other=0)
    row = gl.load(tile + 2, mask=inside, other=0)
    tokens = gl.load(tile + 3, mask=inside, other=0)
    return sequence, first_position, row, tokens


@gluon.jit
def scheduled_turns(schedule):
    """The number of work items of this program in a schedule of prefill_schedule."""
    return gl.load(schedule + gl.program_id(0) * 4)


@gluon.jit
def scheduled_tile(schedule, turn, KV_HEADS: gl.constexpr):
    """KV head, sequence, position and row of q of the first token, and number of tokens of this program's item."""
    item = schedule + ((turn + 1) * gl.num_programs(0) + gl.program_id(0)) * 4
    pair = gl.load(item)
    first_position = gl.load(item + 1)
    row = gl.load(item + 2)
    tokens = gl.load(item + 3)
    return pair % KV_HEADS, pair // KV_HEADS, first_position, row, tokens


@gluon.jit
def find_first_key(first_position, window, WINDOWED: gl.constexpr):
    """The first key that a query of the tile sees."""
    first = 0
    if WINDOWED:
        first = gl.maximum(first_position + 1 - window, 0)
    return first


@gluon.jit
def key_ranges(begin, end, first_position, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr):
    """First key of the last block between `begin` and `end`, and first key of the first block that causality masks.

    TOKENS: number of the tile's tokens before the first row of this half.
    """
    last = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
    whole = gl.minimum((first_position + TOKENS + 1) // BLOCK_N * BLOCK_N, last)
    return last, whole


@gluon.constexpr_function
def has_short_offsets(group, head_dim, loaded):
    """Whether `row_pointers` counts from the first row in persistent_prefill. loaded: whether TMA loads the keys.

    As measured: slower for heads of 128 where a division by the group is a shift, and for heads of 64 with TMA.
    """
    return not loaded if head_dim <= 64 else group & (group - 1) != 0


@gluon.jit
def row_pointers(
    data, stride, row, rows, columns, head, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, SHORT: gl.constexpr
):  # fmt: skip
    """Pointers to rows of a tile in queries or results: row r is query head r % GROUP_SIZE of token r // GROUP_SIZE.

    data: with `stride` numbers per token, of which `row` is the tile's first. SHORT: whether to count from the first
    row: one division per row, and no product in 64 bits.
    """
    if SHORT:
        tokens = (rows.to(gl.uint32) // GROUP_SIZE).to(gl.int32)
        offs = tokens * (stride - GROUP_SIZE * HEAD_DIM) + rows * HEAD_DIM
        first = data + (row.to(gl.int64) * stride + head * (GROUP_SIZE * HEAD_DIM))
        pointers = first + (gl.expand_dims(offs, 1) + columns)
    else:
        offs = (row + rows // GROUP_SIZE).to(gl.int64) * stride
        offs += (head * GROUP_SIZE + rows % GROUP_SIZE) * HEAD_DIM
        pointers = data + gl.expand_dims(offs, 1) + columns
    return pointers


@gluon.jit
def copy_queries(
    q, q_stride, halves, first, row, tokens, head, GROUP_SIZE: gl.constexpr, SHORT_OFFSETS: gl.constexpr
):  # fmt: skip
    """Copy a tile's queries into two of `halves`, [..., BLOCK_M // 2, HEAD_DIM], from number `first` on.

    Zeros beyond the tile's tokens; a half without any may stay as it is. SHORT_OFFSETS: see row_pointers.
    """
    HALF_M: gl.constexpr = halves.shape[1]
    HEAD_DIM: gl.constexpr = halves.shape[2]
    # With one buffer for heads of 128, what is computed for each half would displace other offsets from the registers.
    COUNTED: gl.constexpr = SHORT_OFFSETS and (halves.shape[0] > 2 or HEAD_DIM <= 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    count = 2
    if COUNTED:
        count = gl.cdiv(tokens * GROUP_SIZE, HALF_M)
    for half in range(count):  # not unrolled, or divisions of all rows would be kept in registers, which are few
        part = halves.index(first + half)
        for begin in gl.static_range(0, HALF_M, _COPIED_ROWS):
            rows = half * HALF_M + begin + gl.arange(0, _COPIED_ROWS, gl.SliceLayout(1, layout))
            gluon_copies.load(
                part.slice(begin, _COPIED_ROWS),
                row_pointers(q, q_stride, row, rows, columns, head, GROUP_SIZE, HEAD_DIM, SHORT_OFFSETS),
                mask=gl.expand_dims(rows < tokens * GROUP_SIZE, 1),
            )


@gluon.jit
def copy_block(
    cache, at, positions, start_n, first_key, end, whole, head, stage,
    KV_HEADS: gl.constexpr, WINDOWED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy the block of keys or values from position `start_n` on into `stage`, [BLOCK_N, HEAD_DIM].

    Zeros before `first_key` and, unless `whole`, from position `end` on: the cache may hold NaN there, which a weight
    of 0 does not cancel. at, positions: offset in the cache, and position, of each run's first token.
    """
    BLOCK_N: gl.constexpr = stage.shape[0]
    HEAD_DIM: gl.constexpr = stage.shape[1]
    runs = stage.reshape((BLOCK_N // _RUN, _RUN, HEAD_DIM))
    rows = gl.expand_dims(gl.arange(0, _RUN, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 1)
    pointers = cache + gl.expand_dims(gl.expand_dims(at, 1), 2) + (head * HEAD_DIM + columns)
    pointers += gl.expand_dims(rows, 2) * (KV_HEADS * HEAD_DIM)
    if WINDOWED:
        whole = whole & (start_n >= first_key)
    if whole:
        gluon_copies.load(runs, pointers)
    else:
        places = gl.expand_dims(positions, 1) + rows
        inside = places < end
        if WINDOWED:
            inside = inside & (places >= first_key)
        gluon_copies.load(runs, pointers, mask=gl.expand_dims(inside, 2))


@gluon.jit
def split_by_thread(block):
    """A wgmma result of [rows, columns] as [rows, columns / 8, 4, 2]: four threads share a row, two of eight columns
    each."""
    return block.reshape((block.shape[0], block.shape[1] // 8, 4, 2))


@gluon.jit
def row_maxima(qk):
    """Maxima of the rows of a wgmma result. A thread's even and odd columns are two chains of instructions, not one."""
    maxima = gl.max(gl.max(gl.max(split_by_thread(qk), 1), 2), 1)
    return gl.convert_layout(maxima, gl.SliceLayout(1, qk.type.layout), assert_trivial=True)


@gluon.jit
def thread_sums(p):
    """Sums of the columns that a thread has of each row of a wgmma result: [rows, 4]."""
    return gl.sum(gl.sum(split_by_thread(p), 1), 2)


@gluon.jit
def masked(qk, q_positions, start_n, window, WINDOWED: gl.constexpr):
    """Minus infinity for the scores of keys that a row does not see, in the block from `start_n` on.

    Columns are split by thread, so that a thread compares with constants.
    """
    layout: gl.constexpr = qk.type.layout
    split = split_by_thread(qk)
    of_split: gl.constexpr = split.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, of_split)))
    of_eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, of_split)))
    of_threads: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, of_split)))
    of_pairs: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_split)))
    eights = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, qk.shape[1] // 8, of_eights), 0), 2), 3)
    threads = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, of_threads), 0), 1), 3)
    pairs = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, of_pairs), 0), 1), 2)
    last = gl.convert_layout(q_positions - start_n, of_rows)
    last = gl.expand_dims(gl.expand_dims(gl.expand_dims(last, 1), 2), 3) - 2 * threads
    columns = 8 * eights + pairs
    visible = columns <= last
    if WINDOWED:
        visible = visible & (columns > last - window)
    qk = gl.where(visible, split, float("-inf")).reshape(qk.shape)
    return gl.convert_layout(qk, layout, assert_trivial=True)


@gluon.jit
def soften(
    qk, acc, m_i, l_i, q_positions, start_n, scale, softcap, window, needs_mask,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Online softmax of the scores of the block from `start_n` on; without a mask every row sees the whole block.

    l_i: sums by thread, [rows, 4]. Returns p, the rescaled acc, and the new m_i and l_i.
    """
    factor = score_factor(scale, SOFTCAP)
    if SOFTCAP:
        qk = capped(qk * scale, softcap)
    if needs_mask:
        qk = masked(qk, q_positions, start_n, window, WINDOWED)
    m_new = gl.maximum(m_i, row_maxima(qk) * factor)
    # Before p, so that the products are computed while p waits for the unit of exponentials.
    alpha = gl.exp2(m_i - m_new)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)
    l_i = l_i * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout)), 1)
    p = gl.exp2(qk * factor - gl.expand_dims(m_new, 1))
    return p, acc, m_new, l_i + thread_sums(p)


@gluon.jit
def store_rows(
    out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF: gl.constexpr, GROUP_SIZE: gl.constexpr,
    SHORT_OFFSETS: gl.constexpr,
):  # fmt: skip
    """Divide the rows of a half of a tile by their sums l_i, in any layout, and store those of its tokens.

    Threads exchange numbers such that each stores 16 bytes next to those of its neighbours. In the layout of acc each
    has 4 bytes, and four threads 16 of a row. SHORT_OFFSETS: see row_pointers.
    """
    HALF_M: gl.constexpr = acc.shape[0]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    sums = gl.convert_layout(l_i, gl.SliceLayout(1, acc.type.layout))
    first = HALF * HALF_M
    inside = first + gl.arange(0, HALF_M, gl.SliceLayout(1, acc.type.layout)) < tokens * GROUP_SIZE
    share = value_scale / gl.where(inside, sums, 1.0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    result = gl.convert_layout((acc * gl.expand_dims(share, 1)).to(out.dtype.element_ty), layout)
    rows = first + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    mask = gl.expand_dims(rows < tokens * GROUP_SIZE, 1)
    if SHORT_OFFSETS:
        # What differs from tile to tile keeps the compiler from holding offsets in registers, which are few, meanwhile.
        rows = gl.minimum(rows, tokens * GROUP_SIZE)
    pointers = row_pointers(out, out_stride, row, rows, columns, head, GROUP_SIZE, HEAD_DIM, SHORT_OFFSETS)
    gl.store(pointers, result, mask=mask)
