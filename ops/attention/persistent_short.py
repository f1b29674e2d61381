"""Prefill attention of short prompts in Gluon for GPUs with wgmma: persistent_prefill, pipelined across tiles.

The tiles of a program form one sequence of blocks of keys. Step s multiplies the queries of a block's tile with the
keys of block s, and the softmax of step s - 1 with the values of block s - 1, also where block s belongs to the next
tile. So a tile of n blocks has n steps instead of n + 1, and its results are stored while the next scores are
computed. The queries of two tiles are in shared memory. Short prompts have few blocks per tile, so they gain; a prompt
of 8192 tokens takes up to 5 % more than by persistent_prefill, with blocks of 128 keys in both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.ops.attention.persistent_steps import (
    RUN,
    copy_block,
    copy_queries,
    count_turns,
    find_first_key,
    item_of_turn,
    key_ranges,
    soften,
    store_rows,
    thread_sums,
    tile_of_item,
    wait_for_stage,
)
from engine.ops.common.launch import release, wait

_RUN = gl.constexpr(RUN)


@gluon.jit
def _copy(
    arguments, shared,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The warps that copy queries, keys and values into shared memory."""
    q, keys, values, tables, tiles, q_stride, table_stride, window, items = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    threads: gl.constexpr = [256 // HEAD_DIM, 1, HEAD_DIM // 8]
    layout: gl.constexpr = gl.BlockedLayout([1, _RUN, 8], threads, [gl.num_warps(), 1, 1], [2, 1, 0])
    runs = gl.arange(0, BLOCK_N // _RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * _RUN
    programs = gl.num_programs(0)
    item = item_of_turn(0, programs)
    sequence, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    # The previous block, whose values are copied with the keys of this one: also from a tile to the next.
    at_before = (runs * 0).to(gl.int64)
    start_before = 0
    first_key_before = 0
    end_before = 0
    head_before = 0
    for turn in range(count_turns(items, programs)):
        next_item = item_of_turn(turn + 1, programs)
        next_sequence, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        head = item % KV_HEADS
        first_key = find_first_key(first_position, window, WINDOWED)
        begin = first_key // BLOCK_N * BLOCK_N
        end = first_position + tokens
        table = tables + sequence.to(gl.int64) * table_stride
        block_ids = gl.load(table + (begin + runs) // BLOCK_SIZE, mask=begin + runs < end, other=0)
        if turn == 0:
            # Tiles and block tables, which no kernel still running writes, are read before the wait. Queries, keys,
            # values and results are touched only after it.
            wait(PDL)
        mbarrier.wait(q_free.index(turn % 2), (turn // 2 & 1) ^ 1)
        copy_queries(q, q_stride, q_halves, turn % 2 * 2, row, tokens, head, GROUP_SIZE)
        async_copy.mbarrier_arrive(q_filled.index(turn % 2), increment_count=False)
        for start_n in range(begin, end, BLOCK_N):
            positions = start_n + runs
            at = (block_ids.to(gl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
            next_positions = positions + BLOCK_N
            block_ids = gl.load(table + next_positions // BLOCK_SIZE, mask=next_positions < end, other=0)
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            copy_block(
                keys, at, positions, start_n, first_key, end, start_n + BLOCK_N <= end, head,
                k_stages.index(stage), KV_HEADS, WINDOWED, layout,
            )  # fmt: skip
            if step > 0:
                copy_block(
                    values, at_before, start_before + runs, start_before, first_key_before, end_before,
                    start_before + BLOCK_N <= end_before, head_before,
                    v_stages.index(stage), KV_HEADS, WINDOWED, layout,
                )  # fmt: skip
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            at_before = at
            start_before = start_n
            first_key_before = first_key
            end_before = end
            head_before = head
            step += 1
        item, sequence, first_position = next_item, next_sequence, next_first_position
        row, tokens = next_row, next_tokens
    stage = step % STAGES
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    copy_block(
        values, at_before, start_before + runs, start_before, first_key_before, end_before,
        start_before + BLOCK_N <= end_before, head_before, v_stages.index(stage), KV_HEADS, WINDOWED, layout,
    )  # fmt: skip
    async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)


@gluon.jit
def _advance(
    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Start both products of a step; qk: scores of the previous step, of the block from `start_n` on.

    Returns the sums and the new scores, both in flight, and the new m_i and l_i.
    """
    _, k_stages, v_stages, _, _, filled, _ = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    stage = step % STAGES
    qk_layout: gl.constexpr = qk.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    wait_for_stage(filled, step)
    p, acc, m_i, l_i = soften(
        qk, acc, m_i, l_i, q_positions, start_n, scale, softcap, window, needs_mask, WINDOWED, SOFTCAP
    )
    left = gl.convert_layout(p.to(q.dtype), operand)
    zeros = gl.zeros(qk.shape, gl.float32, qk_layout)
    acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
    qk = warpgroup_mma(q, k_stages.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return acc, qk, m_i, l_i


@gluon.jit
def _attend(
    arguments, shared, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items = arguments
    q_halves, k_stages, _, q_filled, q_free, filled, free = shared
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    STAGES: gl.constexpr = k_stages.shape[0]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    HALF_M: gl.constexpr = q_halves.shape[1]
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    rows = HALF * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, qk_layout))
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, qk_layout)
    programs = gl.num_programs(0)
    turns = count_turns(items, programs)
    item = item_of_turn(0, programs)
    _, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    mbarrier.wait(q_filled.index(0), 0)
    wait_for_stage(filled, 0)
    first_keys = k_stages.index(0).permute((1, 0))
    qk = warpgroup_mma(q_halves.index(HALF), first_keys, zeros, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(free.index(0), count=1)
    step = 1
    for turn in range(turns):
        next_item = item_of_turn(turn + 1, programs)
        _, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        head = item % KV_HEADS
        begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
        end = first_position + tokens
        last, whole = key_ranges(begin, end, first_position, BLOCK_N, HALF * HALF_M // GROUP_SIZE, WINDOWED)
        q_positions = first_position + rows // GROUP_SIZE
        # Finite, so that a row that sees no key of a block does not compute inf - inf.
        m_i = gl.full([HALF_M], -1e30, gl.float32, gl.SliceLayout(1, qk_layout))
        l_i = thread_sums(zeros)
        acc = gl.zeros([HALF_M, HEAD_DIM], gl.float32, acc_layout)
        q = q_halves.index(turn % 2 * 2 + HALF)
        # One loop, not one per kind of block: where the first of two loops had no iteration, ptxas (of Triton 3.6) let
        # the second multiply with a descriptor of q that was computed only on the way into the first.
        for start_n in range(begin, last, BLOCK_N):
            acc, qk, m_i, l_i = _advance(
                q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, start_n >= whole,
                WINDOWED, SOFTCAP,
            )  # fmt: skip
            acc, qk = warpgroup_mma_wait(0, deps=[acc, qk])
            mbarrier.arrive(free.index(step % STAGES), count=1)
            step += 1
        mbarrier.arrive(q_free.index(turn % 2), count=1)
        if turn + 1 < turns:
            mbarrier.wait(q_filled.index((turn + 1) % 2), (turn + 1) // 2 & 1)
        # The scores are those of the next tile's first block; after the last tile, of whatever is there.
        next_q = q_halves.index((turn + 1) % 2 * 2 + HALF)
        acc, qk, m_i, l_i = _advance(
            next_q, shared, acc, qk, m_i, l_i, step, q_positions, last, scale, softcap, window, True,
            WINDOWED, SOFTCAP,
        )  # fmt: skip
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, qk_layout))
        if SINKS:
            sink = gl.load(sinks + head * GROUP_SIZE + rows % GROUP_SIZE)
            l_i += gl.exp2(sink * 1.4426950408889634 - m_i)
        acc = warpgroup_mma_wait(1, deps=[acc])
        store_rows(out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF, GROUP_SIZE)
        qk = warpgroup_mma_wait(0, deps=[qk])
        mbarrier.arrive(free.index(step % STAGES), count=1)
        step += 1
        item, first_position, row, tokens = next_item, next_first_position, next_row, next_tokens


@gluon.jit(do_not_specialize=["table_stride", "window", "items"])
def short_prefill_kernel(
    q, keys, values, tables, tiles, out, sinks, q_stride, out_stride, table_stride, scale, softcap, window, value_scale,
    items, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """items: tiles times KV_HEADS. Grid: programs, at most one per item. Other arguments as in paged_prefill."""
    dtype: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Halves of the queries of two tiles.
    q_halves = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, HEAD_DIM], swizzled)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    q_filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Each copying thread arrives when its copies are complete; of a multiplying group, one thread arrives for all.
    for buffer in gl.static_range(2):
        mbarrier.init(q_filled.index(buffer), count=128)
        mbarrier.init(q_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=128)
        mbarrier.init(free.index(stage), count=2)
    shared = (q_halves, k_stages, v_stages, q_filled, q_free, filled, free)
    release(PDL)
    attended = (out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items)
    copied = (q, keys, values, tables, tiles, q_stride, table_stride, window, items)
    gl.warp_specialize(
        [
            (_attend, (attended, shared, 0, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_attend, (attended, shared, 1, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_copy, (copied, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE, WINDOWED, PDL)),
        ],
        [4, 4],
        [224, 56],  # registers per thread; the first group gets the rest, 224 too
    )
