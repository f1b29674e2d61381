"""Attention of long stretches of prompts, written in Gluon: programs that stay, on GPUs with wgmma.

There is one program a multiprocessor, and it goes through tiles; what a tile is, paged_prefill tells. Its warps are in
three groups. One copies queries, keys and values, which lie in pages, and is ahead of the others by some stages, at the
end of a tile in the next one. Two multiply, each for half of the rows, and take turns: while the tensor cores work for
one, the other computes exponents (Shah et al. 2024, "FlashAttention-3").

A tile with n blocks of keys has n + 1 steps. In step s its queries meet the keys of block s, and what became of their
scores in step s - 1 meets the values of that block; a stage holds just these keys and values. Copying takes issue slots
from multiplying, so that eight keys share a look at the table of pages and an address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.ops.attention.paged_decode import capped, score_factor
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

if TYPE_CHECKING:
    from engine.ops.attention.paged_prefill import PrefillConfig

HEAD_DIMS = (64, 128)
RUN = 8
"""Keys that lie one behind another: a page has a multiple of them."""
_RUN = gl.constexpr(RUN)
_COPIED_ROWS = gl.constexpr(32)  # of the queries at once, so that addresses fit into the registers


@gluon.jit
def _item(turn, programs):
    """Of the list of tiles and heads, the one that this program takes in its `turn`.

    They come with the most work first, so programs take them in order and then in reverse, for equal shares.
    """
    me = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, me, programs - 1 - me)


@gluon.jit
def _tile(tiles, item, items, HEADS: gl.constexpr):
    """Of an item: its sequence, its first token's position and row of q, and how many tokens it has."""
    tile = tiles + item // HEADS * 4
    inside = item < items
    sequence = gl.load(tile, mask=inside, other=0)
    oldest = gl.load(tile + 1, mask=inside, other=0)
    row = gl.load(tile + 2, mask=inside, other=0)
    tokens = gl.load(tile + 3, mask=inside, other=0)
    return sequence, oldest, row, tokens


@gluon.jit
def _first_key(oldest, window, KEYS: gl.constexpr, WINDOWED: gl.constexpr):
    begin = 0
    if WINDOWED:
        begin = gl.maximum(oldest + 1 - window, 0) // KEYS * KEYS
    return begin


@gluon.jit
def _copy_queries(q, q_stride, part, row, tokens, head, GROUP: gl.constexpr):
    """A tile's queries into `part`, [rows, head_dim]; zeros where the tile has no more tokens."""
    ROWS: gl.constexpr = part.shape[0]
    DIM: gl.constexpr = part.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    for begin in gl.static_range(0, ROWS, _COPIED_ROWS):
        rows = begin + gl.arange(0, _COPIED_ROWS, gl.SliceLayout(1, layout))
        at = (row + rows // GROUP).to(gl.int64) * q_stride + (head * GROUP + rows % GROUP) * DIM
        async_copy.async_copy_global_to_shared(
            part.slice(begin, _COPIED_ROWS),
            q + gl.expand_dims(at, 1) + columns,
            mask=gl.expand_dims(rows < tokens * GROUP, 1),
        )


@gluon.jit
def _copy_block(cache, at, positions, end, whole, head, stage, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """A block of keys or values into `stage`, [keys, head_dim]; zeros from position `end` on, unless it is `whole`.

    at: where in the cache's tokens and heads each run begins; positions: its first position.
    """
    KEYS: gl.constexpr = stage.shape[0]
    DIM: gl.constexpr = stage.shape[1]
    runs = stage.reshape((KEYS // _RUN, _RUN, DIM))
    rows = gl.expand_dims(gl.arange(0, _RUN, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    columns = gl.expand_dims(gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0), 1)
    pointers = cache + gl.expand_dims(gl.expand_dims(at, 1), 2) + (head * DIM + columns)
    pointers += gl.expand_dims(rows, 2) * (HEADS * DIM)
    if whole:
        async_copy.async_copy_global_to_shared(runs, pointers)
    else:
        inside = gl.expand_dims(gl.expand_dims(positions, 1) + rows < end, 2)
        async_copy.async_copy_global_to_shared(runs, pointers, mask=inside)


@gluon.jit
def _copy(arguments, shared, HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, WINDOWED: gl.constexpr):
    """The group of warps that copies."""
    q, keys, values, tables, tiles, q_stride, table_stride, window, items = arguments
    q_tile, k_stages, v_stages, q_filled, q_free, filled, free, _ = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    KEYS: gl.constexpr = k_stages.shape[1]
    DIM: gl.constexpr = k_stages.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, _RUN, 8], [256 // DIM, 1, DIM // 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    runs = gl.arange(0, KEYS // _RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * _RUN
    programs = gl.num_programs(0)
    item = _item(0, programs)
    sequence, oldest, row, tokens = _tile(tiles, item, items, HEADS)
    step = 0
    for turn in range(gl.cdiv(items, programs)):
        next_item = _item(turn + 1, programs)
        next_sequence, next_oldest, next_row, next_tokens = _tile(tiles, next_item, items, HEADS)
        if item < items:
            head = item % HEADS
            begin = _first_key(oldest, window, KEYS, WINDOWED)
            end = oldest + tokens
            table = tables + sequence.to(gl.int64) * table_stride
            positions = begin + runs
            pages = gl.load(table + positions // PAGE, mask=positions < end, other=0)
            mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
            _copy_queries(q, q_stride, q_tile, row, tokens, head, GROUP)
            async_copy.mbarrier_arrive(q_filled.index(0), increment_count=False)
            at = (pages.to(gl.int64) * PAGE + positions % PAGE) * (HEADS * DIM)
            at_before = gl.zeros_like(at)  # a value of its own, or the loop would not carry it
            for start in range(begin, end + KEYS, KEYS):
                following = positions + KEYS
                pages = gl.load(table + following // PAGE, mask=following < end, other=0)
                stage = step % STAGES
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                if start > begin:
                    part = v_stages.index(stage)
                    _copy_block(values, at_before, positions - KEYS, end, start <= end, head, part, HEADS, layout)
                if start < end:
                    part = k_stages.index(stage)
                    _copy_block(keys, at, positions, end, start + KEYS <= end, head, part, HEADS, layout)
                async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
                at_before = at
                at = (pages.to(gl.int64) * PAGE + following % PAGE) * (HEADS * DIM)
                positions = following
                step += 1
        item, sequence, oldest, row, tokens = next_item, next_sequence, next_oldest, next_row, next_tokens


@gluon.jit
def _soften(
    scores, top, weight, at_rows, start, scale, softcap, window,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Online softmax of the scores of the block from `start` on; without MASKED all rows see all of it.

    Returns their exponents, the new greatest score and sum of exponents of each row, and what older sums count now.
    """
    factor = score_factor(scale, SOFTCAP)
    if SOFTCAP:
        scores = capped(scores * scale, softcap)
    if MASKED:
        positions = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        distance = gl.expand_dims(at_rows, 1) - gl.expand_dims(positions, 0)
        seen = distance >= 0
        if WINDOWED:
            seen = seen & (distance < window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    exponents = gl.exp2(scores * factor - gl.expand_dims(new_top, 1))
    fade = gl.exp2(top - new_top)
    return exponents, new_top, weight * fade + gl.sum(exponents, 1), fade


@gluon.jit
def _begin_step(shared, step, HALF: gl.constexpr):
    """Wait for the step's stage and this half's turn; returns the stage."""
    _, k_stages, _, _, _, filled, _, turns = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    mbarrier.wait(filled.index(step % STAGES), step // STAGES & 1)
    mbarrier.wait(turns.index(HALF), (step & 1) ^ (1 - HALF))
    fence_async_shared()
    return step % STAGES


@gluon.jit
def _advance(
    q, shared, acc, scores, top, weight, step, at_rows, start, scale, softcap, window,
    HALF: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The step after the scores of the block from `start` on, which is not the last."""
    _, k_stages, v_stages, _, _, _, free, turns = shared
    of_keys: gl.constexpr = scores.type.layout
    lines: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    exponents, top, weight, fade = _soften(
        scores, top, weight, at_rows, start, scale, softcap, window, WINDOWED, SOFTCAP, MASKED
    )
    acc = acc * gl.expand_dims(gl.convert_layout(fade, lines), 1)
    left = gl.convert_layout(exponents.to(q.dtype), operand)
    nothing = gl.zeros(scores.shape, gl.float32, of_keys)
    stage = _begin_step(shared, step, HALF)
    acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
    scores = warpgroup_mma(q, k_stages.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF), count=1)
    acc, scores = warpgroup_mma_wait(0, deps=[acc, scores])
    mbarrier.arrive(free.index(stage), count=1)
    return acc, scores, top, weight


@gluon.jit
def _attend(
    arguments,
    shared,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """A group of warps that multiplies; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, tiles, out_stride, scale, softcap, window, value_scale, items = arguments
    q_tile, k_stages, v_stages, q_filled, q_free, _, free, turns = shared
    KEYS: gl.constexpr = k_stages.shape[1]
    DIM: gl.constexpr = k_stages.shape[2]
    ROWS: gl.constexpr = q_tile.shape[0] // 2
    of_keys: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    q = q_tile.slice(HALF * ROWS, ROWS)
    rows = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_keys))
    out_rows = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_out))
    columns = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, of_out)), 0)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, of_keys)
    programs = gl.num_programs(0)
    item = _item(0, programs)
    _, oldest, row, tokens = _tile(tiles, item, items, HEADS)
    step = 0
    for turn in range(gl.cdiv(items, programs)):
        next_item = _item(turn + 1, programs)
        _, next_oldest, next_row, next_tokens = _tile(tiles, next_item, items, HEADS)
        if item < items:
            head = item % HEADS
            begin = _first_key(oldest, window, KEYS, WINDOWED)
            end = oldest + tokens
            last = begin + (end - begin - 1) // KEYS * KEYS
            # Every row here sees all keys before `whole`, which begins a block.
            whole = begin
            if not WINDOWED:
                whole = gl.minimum((oldest + HALF * ROWS // GROUP + 1) // KEYS * KEYS, last)
            at_rows = oldest + rows // GROUP
            # Finite, so that a row that sees nothing of a block computes no infinity less infinity.
            top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, of_keys))
            weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, of_keys))
            acc = gl.zeros([ROWS, DIM], gl.float32, of_out)

            mbarrier.wait(q_filled.index(0), turn & 1)
            stage = _begin_step(shared, step, HALF)
            scores = warpgroup_mma(q, k_stages.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
            for start in range(begin, whole, KEYS):
                acc, scores, top, weight = _advance(
                    q, shared, acc, scores, top, weight, step, at_rows, start, scale, softcap, window,
                    HALF, WINDOWED, SOFTCAP, False,
                )  # fmt: skip
                step += 1
            for start in range(whole, last, KEYS):
                acc, scores, top, weight = _advance(
                    q, shared, acc, scores, top, weight, step, at_rows, start, scale, softcap, window,
                    HALF, WINDOWED, SOFTCAP, True,
                )  # fmt: skip
                step += 1
            mbarrier.arrive(q_free.index(0), count=1)
            exponents, top, weight, fade = _soften(
                scores, top, weight, at_rows, last, scale, softcap, window, WINDOWED, SOFTCAP, True
            )
            acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, of_out)), 1)
            left = gl.convert_layout(exponents.to(q.dtype), gl.DotOperandLayout(0, of_out, 2))
            stage = _begin_step(shared, step, HALF)
            acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1

            real = out_rows < tokens * GROUP
            share = value_scale / gl.where(real, gl.convert_layout(weight, gl.SliceLayout(1, of_out)), 1.0)
            result = (acc * gl.expand_dims(share, 1)).to(out.dtype.element_ty)
            at = (row + out_rows // GROUP).to(gl.int64) * out_stride + (head * GROUP + out_rows % GROUP) * DIM
            gl.store(out + gl.expand_dims(at, 1) + columns, result, mask=gl.expand_dims(real, 1))
        item, oldest, row, tokens = next_item, next_oldest, next_row, next_tokens


@gluon.jit(do_not_specialize=["table_stride", "window", "items"])
def _prefill_kernel(
    q, keys, values, tables, tiles, out, q_stride, out_stride, table_stride, scale, softcap, window, value_scale, items,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """items: tiles times HEADS. Grid: programs, at most one an item. The rest as in paged_prefill."""
    dtype: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, DIM], swizzled)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], swizzled)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], swizzled)
    q_filled = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Each thread that copies says when its copies are there; of a group that multiplies one thread speaks for all.
    mbarrier.init(q_filled.index(0), count=128)
    mbarrier.init(q_free.index(0), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=128)
        mbarrier.init(free.index(stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    shared = (q_tile, k_stages, v_stages, q_filled, q_free, filled, free, turns)
    wait(PDL)
    release(PDL)
    attended = (out, tiles, out_stride, scale, softcap, window, value_scale, items)
    copied = (q, keys, values, tables, tiles, q_stride, table_stride, window, items)
    gl.warp_specialize(
        [
            (_attend, (attended, shared, 0, HEADS, GROUP, WINDOWED, SOFTCAP)),
            (_attend, (attended, shared, 1, HEADS, GROUP, WINDOWED, SOFTCAP)),
            (_copy, (copied, shared, HEADS, GROUP, PAGE, WINDOWED)),
        ],
        [4, 4],
        [224, 56],  # registers a thread; the first group has what these leave, 224 too
    )


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    value_scale: float,
    config: PrefillConfig,
) -> None:
    """See paged_prefill, and `can_persist` there for what it takes."""
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    items = len(tiles) * num_kv_heads
    _prefill_kernel[(min(items, num_sms(q.device)),)](
        q,
        keys,
        values,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
        value_scale,
        items,
        HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        DIM=head_dim,
        PAGE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        ROWS=config.rows,
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
        **dependent_launch(q.device),
    )
