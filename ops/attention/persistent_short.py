"""Prefill attention of short prompts in Gluon for GPUs with wgmma: persistent_prefill, pipelined across tiles.

The tiles of a program form one sequence of blocks of keys. Step s multiplies the queries of a block's tile with the
keys of block s, and the softmax of step s - 1 with the values of block s - 1, also where block s belongs to the next
tile. So a tile of n blocks has n steps instead of n + 1, and its results are stored while the next scores are
computed. The queries of two tiles are in shared memory. Short prompts have few blocks per tile, so they gain; a prompt
of 8192 tokens takes up to 5 % more than by persistent_prefill, with blocks of 128 keys in both. Which tiles a program
computes is decided on the host (prefill_schedule).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from engine.ops.attention.persistent_stages import (
    begin_rows,
    find_offsets,
    look_up,
    product_layout,
    run_layout,
    start_scores,
    start_step,
    total,
    wait_for_stage,
    wait_until_filled,
    wait_until_free,
)
from engine.ops.attention.persistent_steps import (
    RUN,
    copy_block,
    copy_queries,
    find_first_key,
    key_ranges,
    scheduled_tile,
    scheduled_turns,
    store_rows,
)
from engine.ops.common.launch import wait

_RUN = gl.constexpr(RUN)


@gluon.jit
def copy_across_tiles(
    arguments, shared,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The warps that copy queries, keys and values into shared memory."""
    q, keys, values, tables, schedule, q_stride, table_stride, window = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    layout: gl.constexpr = run_layout(HEAD_DIM, gl.num_warps())
    runs = gl.arange(0, BLOCK_N // _RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * _RUN
    head, sequence, first_position, row, tokens = scheduled_tile(schedule, 0, KV_HEADS)
    step = 0
    # The previous block, whose values are copied with the keys of this one: also from a tile to the next.
    at_before = (runs * 0).to(gl.int64)
    start_before = 0
    first_key_before = 0
    end_before = 0
    head_before = 0
    for turn in range(scheduled_turns(schedule)):
        next_head, next_sequence, next_first_position, next_row, next_tokens = scheduled_tile(
            schedule, turn + 1, KV_HEADS
        )
        first_key = find_first_key(first_position, window, WINDOWED)
        begin = first_key // BLOCK_N * BLOCK_N
        end = first_position + tokens
        table = tables + sequence.to(gl.int64) * table_stride
        block_ids = look_up(table, begin + runs, end, BLOCK_SIZE)
        if turn == 0:
            # Tiles and block tables, which no kernel still running writes, are read before the wait. Queries, keys,
            # values and results are touched only after it.
            wait(PDL)
        wait_until_free(q_free, turn)
        copy_queries(q, q_stride, q_halves, turn % 2 * 2, row, tokens, head, GROUP_SIZE, True)
        async_copy.mbarrier_arrive(q_filled.index(turn % 2), increment_count=False)
        for start_n in range(begin, end, BLOCK_N):
            positions = start_n + runs
            at = find_offsets(block_ids, positions, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            block_ids = look_up(table, positions + BLOCK_N, end, BLOCK_SIZE)
            stage = step % STAGES
            wait_until_free(free, step)
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
        head, sequence, first_position = next_head, next_sequence, next_first_position
        row, tokens = next_row, next_tokens
    stage = step % STAGES
    wait_until_free(free, step)
    copy_block(
        values, at_before, start_before + runs, start_before, first_key_before, end_before,
        start_before + BLOCK_N <= end_before, head_before, v_stages.index(stage), KV_HEADS, WINDOWED, layout,
    )  # fmt: skip
    async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)


@gluon.jit
def attend_across_tiles(
    arguments, shared, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, schedule, sinks, out_stride, scale, softcap, window, value_scale = arguments
    q_halves, k_stages, _, q_filled, q_free, filled, free = shared
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    STAGES: gl.constexpr = k_stages.shape[0]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    HALF_M: gl.constexpr = q_halves.shape[1]
    qk_layout: gl.constexpr = product_layout(BLOCK_N, 16)
    rows = HALF * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, qk_layout))
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, qk_layout)
    turns = scheduled_turns(schedule)
    head, _, first_position, row, tokens = scheduled_tile(schedule, 0, KV_HEADS)
    wait_until_filled(q_filled, 0)
    wait_for_stage(filled, 0)
    qk = start_scores(q_halves.index(HALF), k_stages, 0, zeros)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(free.index(0), count=1)
    step = 1
    for turn in range(turns):
        next_head, _, next_first_position, next_row, next_tokens = scheduled_tile(schedule, turn + 1, KV_HEADS)
        begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
        end = first_position + tokens
        last, whole = key_ranges(begin, end, first_position, BLOCK_N, HALF * HALF_M // GROUP_SIZE)
        q_positions = first_position + rows // GROUP_SIZE
        m_i, l_i, acc = begin_rows(zeros, HEAD_DIM)
        q = q_halves.index(turn % 2 * 2 + HALF)
        # One loop, not one per kind of block: where the first of two loops had no iteration, ptxas (of Triton 3.6) let
        # the second multiply with a descriptor of q that was computed only on the way into the first.
        for start_n in range(begin, last, BLOCK_N):
            needs_mask = start_n >= whole
            if WINDOWED:
                needs_mask = needs_mask | (start_n < end - window)
            acc, qk, m_i, l_i = start_step(
                q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
                WINDOWED, SOFTCAP,
            )  # fmt: skip
            acc, qk = warpgroup_mma_wait(0, deps=[acc, qk])
            mbarrier.arrive(free.index(step % STAGES), count=1)
            step += 1
        mbarrier.arrive(q_free.index(turn % 2), count=1)
        if turn + 1 < turns:
            wait_until_filled(q_filled, turn + 1)
        # The scores are those of the next tile's first block; after the last tile, of whatever is there.
        next_q = q_halves.index((turn + 1) % 2 * 2 + HALF)
        acc, qk, m_i, l_i = start_step(
            next_q, shared, acc, qk, m_i, l_i, step, q_positions, last, scale, softcap, window, True,
            WINDOWED, SOFTCAP,
        )  # fmt: skip
        l_i = total(l_i, m_i, sinks, rows, head, GROUP_SIZE, SINKS)
        acc = warpgroup_mma_wait(1, deps=[acc])
        store_rows(out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF, GROUP_SIZE, True)
        qk = warpgroup_mma_wait(0, deps=[qk])
        mbarrier.arrive(free.index(step % STAGES), count=1)
        step += 1
        head, first_position, row, tokens = next_head, next_first_position, next_row, next_tokens
