"""Prefill attention in Gluon for GPUs with wgmma: persistent programs with specialized warps.

There is one program per multiprocessor; each works through several tiles (see paged_prefill). Its warps are in three
groups. One group copies queries, keys and values from the cache's blocks; it runs ahead of the others by some stages,
at the end of a tile into the next one. The two other groups multiply, each for half of the rows: while the tensor cores
work for one, the other computes exponentials (Shah et al. 2024, "FlashAttention-3").

A tile with n blocks of keys has n + 1 steps. Step s multiplies the queries with the keys of block s, and the softmax
of step s - 1 with the values of block s - 1; a stage holds just these keys and values. Copying takes issue slots from
multiplying, so eight keys share one block table lookup and one address. For short prompts persistent_short has another
kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.ops.attention.persistent_short import short_prefill_kernel
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
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

if TYPE_CHECKING:
    from engine.ops.attention.paged_prefill_config import PrefillConfig

HEAD_DIMS = (64, 128)
_RUN = gl.constexpr(RUN)


@gluon.jit
def _copy(
    arguments, shared,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOWED: gl.constexpr,
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
    for turn in range(count_turns(items, programs)):
        next_item = item_of_turn(turn + 1, programs)
        next_sequence, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        head = item % KV_HEADS
        first_key = find_first_key(first_position, window, WINDOWED)
        begin = first_key // BLOCK_N * BLOCK_N
        end = first_position + tokens
        table = tables + sequence.to(gl.int64) * table_stride
        positions = begin + runs
        block_ids = gl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
        mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
        copy_queries(q, q_stride, q_halves, 0, row, tokens, head, GROUP_SIZE)
        async_copy.mbarrier_arrive(q_filled.index(0), increment_count=False)
        at = (block_ids.to(gl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        at_before = gl.zeros_like(at)  # a separate value, or the loop would not carry it
        for start_n in range(begin, end + BLOCK_N, BLOCK_N):
            next_positions = positions + BLOCK_N
            block_ids = gl.load(table + next_positions // BLOCK_SIZE, mask=next_positions < end, other=0)
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            if start_n > begin:
                part = v_stages.index(stage)
                copy_block(
                    values, at_before, positions - BLOCK_N, start_n - BLOCK_N, first_key, end, start_n <= end, head,
                    part, KV_HEADS, WINDOWED, layout,
                )  # fmt: skip
            if start_n < end:
                part = k_stages.index(stage)
                copy_block(
                    keys, at, positions, start_n, first_key, end, start_n + BLOCK_N <= end, head,
                    part, KV_HEADS, WINDOWED, layout,
                )  # fmt: skip
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            at_before = at
            at = (block_ids.to(gl.int64) * BLOCK_SIZE + next_positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
            positions = next_positions
            step += 1
        item, sequence, first_position = next_item, next_sequence, next_first_position
        row, tokens = next_row, next_tokens


@gluon.jit
def _advance(
    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute a step that is not the last; qk: scores of the previous step, of the block from `start_n` on."""
    _, k_stages, v_stages, _, _, filled, free = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    WAITS_EARLY: gl.constexpr = STAGES > 2  # with two stages, a copy takes about as long as the softmax
    stage = step % STAGES
    qk_layout: gl.constexpr = qk.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    if WAITS_EARLY:
        wait_for_stage(filled, step)
    p, acc, m_i, l_i = soften(
        qk, acc, m_i, l_i, q_positions, start_n, scale, softcap, window, MASKED, WINDOWED, SOFTCAP
    )
    left = gl.convert_layout(p.to(q.dtype), operand)
    zeros = gl.zeros(qk.shape, gl.float32, qk_layout)
    if not WAITS_EARLY:
        wait_for_stage(filled, step)
    acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
    qk = warpgroup_mma(q, k_stages.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc, qk = warpgroup_mma_wait(0, deps=[acc, qk])
    mbarrier.arrive(free.index(stage), count=1)
    return acc, qk, m_i, l_i


@gluon.jit
def _attend(
    arguments, shared, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    STAGES: gl.constexpr = k_stages.shape[0]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    HALF_M: gl.constexpr = q_halves.shape[1]
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    q = q_halves.index(HALF)
    rows = HALF * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, qk_layout))
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, qk_layout)
    programs = gl.num_programs(0)
    item = item_of_turn(0, programs)
    _, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(count_turns(items, programs)):
        head = item % KV_HEADS
        begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
        end = first_position + tokens
        last, whole = key_ranges(begin, end, first_position, BLOCK_N, HALF * HALF_M // GROUP_SIZE, WINDOWED)
        q_positions = first_position + rows // GROUP_SIZE
        # Finite, so that a row that sees no key of a block does not compute inf - inf.
        m_i = gl.full([HALF_M], -1e30, gl.float32, gl.SliceLayout(1, qk_layout))
        l_i = thread_sums(zeros)
        acc = gl.zeros([HALF_M, HEAD_DIM], gl.float32, acc_layout)

        mbarrier.wait(q_filled.index(0), turn & 1)
        wait_for_stage(filled, step)
        stage = step % STAGES
        qk = warpgroup_mma(q, k_stages.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Loaded here, so that the product hides the latency.
        next_item = item_of_turn(turn + 1, programs)
        _, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        qk = warpgroup_mma_wait(0, deps=[qk])
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
        for start_n in range(begin, whole, BLOCK_N):
            acc, qk, m_i, l_i = _advance(
                q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window,
                WINDOWED, SOFTCAP, False,
            )  # fmt: skip
            step += 1
        for start_n in range(whole, last, BLOCK_N):
            acc, qk, m_i, l_i = _advance(
                q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window,
                WINDOWED, SOFTCAP, True,
            )  # fmt: skip
            step += 1
        mbarrier.arrive(q_free.index(0), count=1)
        p, acc, m_i, l_i = soften(qk, acc, m_i, l_i, q_positions, last, scale, softcap, window, True, WINDOWED, SOFTCAP)
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, qk_layout))
        if SINKS:
            sink = gl.load(sinks + head * GROUP_SIZE + rows % GROUP_SIZE)
            l_i += gl.exp2(sink * 1.4426950408889634 - m_i)
        left = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, acc_layout, 2))
        wait_for_stage(filled, step)
        stage = step % STAGES
        acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage), count=1)
        step += 1

        store_rows(out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF, GROUP_SIZE)
        item, first_position, row, tokens = next_item, next_first_position, next_row, next_tokens


@gluon.jit(do_not_specialize=["table_stride", "window", "items"])
def _prefill_kernel(
    q, keys, values, tables, tiles, out, sinks, q_stride, out_stride, table_stride, scale, softcap, window, value_scale,
    items, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """items: tiles times KV_HEADS. Grid: programs, at most one per item. Other arguments as in paged_prefill."""
    dtype: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_halves = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_DIM], swizzled)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    q_filled = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Each copying thread arrives when its copies are complete; of a multiplying group, one thread arrives for all.
    mbarrier.init(q_filled.index(0), count=128)
    mbarrier.init(q_free.index(0), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=128)
        mbarrier.init(free.index(stage), count=2)
    shared = (q_halves, k_stages, v_stages, q_filled, q_free, filled, free)
    wait(PDL)
    release(PDL)
    attended = (out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items)
    copied = (q, keys, values, tables, tiles, q_stride, table_stride, window, items)
    gl.warp_specialize(
        [
            (_attend, (attended, shared, 0, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_attend, (attended, shared, 1, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_copy, (copied, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE, WINDOWED)),
        ],
        [4, 4],
        [224, 56],  # registers per thread; the first group gets the rest, 224 too
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
    sinks: torch.Tensor | None,
    config: PrefillConfig,
) -> None:
    """Launch the kernel with the arguments of paged_prefill, where `can_persist` says what is supported."""
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    items = len(tiles) * num_kv_heads
    kernel = short_prefill_kernel if config.across_tiles else _prefill_kernel
    kernel[(min(items, num_sms(q.device)),)](
        *(q, keys, values, tables, tiles, out, out if sinks is None else sinks),
        *(q.stride(0), out.stride(0), tables.stride(0)),
        *(scale, softcap or 0.0, window or 0, value_scale, items),
        KV_HEADS=num_kv_heads,
        GROUP_SIZE=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **dependent_launch(q.device),
    )
