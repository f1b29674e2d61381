"""Prefill attention in Gluon for GPUs with wgmma: persistent programs with specialized warps.

There is one program per multiprocessor; each works through several tiles (see paged_prefill). Its warps are in three
groups. One group copies queries, keys and values from the cache's blocks; it runs ahead of the others by some stages,
at the end of a tile into the next one. The two other groups multiply, each for half of the rows: while the tensor cores
work for one, the other computes exponentials (Shah et al. 2024, "FlashAttention-3").

A tile with n blocks of keys has n + 1 steps. Step s multiplies the queries with the keys of block s, and the softmax
of step s - 1 with the values of block s - 1; a stage holds just these keys and values. Copying takes issue slots from
multiplying, so eight keys share one block table lookup and one address. Where a sequence's blocks are consecutive in
memory, one instruction (TMA) loads a whole block of keys instead. For short prompts persistent_short has another
kernel.

At 700 W an H100 computes attention at 1.4 to 1.5 GHz, so what costs energy costs time: instructions, and reads of
memory (see paged_prefill.prefill_order).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.attention.persistent_short import attend_across_tiles, copy_across_tiles
from engine.ops.attention.persistent_stages import (
    COPYING_THREADS,
    begin_rows,
    find_offsets,
    look_up,
    make_stages,
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
    has_short_offsets,
    key_ranges,
    ordered_item,
    ordered_turns,
    soften,
    store_rows,
    tile_of_item,
)
from engine.ops.common import gluon_copies
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
    q, keys, values, tables, tiles, order, q_stride, table_stride, window, items = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    SHORT_OFFSETS: gl.constexpr = has_short_offsets(GROUP_SIZE, HEAD_DIM, False)
    layout: gl.constexpr = run_layout(HEAD_DIM, gl.num_warps())
    runs = gl.arange(0, BLOCK_N // _RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * _RUN
    programs = gl.num_programs(0)
    item = ordered_item(order, 0, items, programs)
    sequence, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(ordered_turns(order, items, programs)):
        next_item = ordered_item(order, turn + 1, items, programs)
        next_sequence, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        head = item % KV_HEADS
        first_key = find_first_key(first_position, window, WINDOWED)
        begin = first_key // BLOCK_N * BLOCK_N
        end = first_position + tokens
        table = tables + sequence.to(gl.int64) * table_stride
        positions = begin + runs
        block_ids = look_up(table, positions, end, BLOCK_SIZE)
        wait_until_free(q_free, turn)
        copy_queries(q, q_stride, q_halves, 0, row, tokens, head, GROUP_SIZE, SHORT_OFFSETS)
        async_copy.mbarrier_arrive(q_filled.index(0), increment_count=False)
        at = find_offsets(block_ids, positions, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        at_before = gl.zeros_like(at)  # a separate value, or the loop would not carry it
        for start_n in range(begin, end + BLOCK_N, BLOCK_N):
            next_positions = positions + BLOCK_N
            block_ids = look_up(table, next_positions, end, BLOCK_SIZE)
            stage = step % STAGES
            wait_until_free(free, step)
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
            at = find_offsets(block_ids, next_positions, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            positions = next_positions
            step += 1
        item, sequence, first_position = next_item, next_sequence, next_first_position
        row, tokens = next_row, next_tokens


@gluon.jit
def _load(
    arguments, shared,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """As _copy without a window, where a sequence's blocks are consecutive in memory.

    What is beyond a sequence's end is loaded too. Its scores are masked; the last block of values is copied, with zeros
    there.
    """
    q, values, key_rows, value_rows, tables, tiles, order, q_stride, table_stride, items = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    NBYTES: gl.constexpr = key_rows.block_type.nbytes
    SHORT_OFFSETS: gl.constexpr = has_short_offsets(GROUP_SIZE, HEAD_DIM, True)
    layout: gl.constexpr = run_layout(HEAD_DIM, gl.num_warps())
    runs = gl.arange(0, BLOCK_N // _RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * _RUN
    programs = gl.num_programs(0)
    item = ordered_item(order, 0, items, programs)
    sequence, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(ordered_turns(order, items, programs)):
        next_item = ordered_item(order, turn + 1, items, programs)
        next_sequence, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        head = item % KV_HEADS
        end = first_position + tokens
        origin = gl.load(tables + sequence.to(gl.int64) * table_stride) * BLOCK_SIZE
        wait_until_free(q_free, turn)
        copy_queries(q, q_stride, q_halves, 0, row, tokens, head, GROUP_SIZE, SHORT_OFFSETS)
        async_copy.mbarrier_arrive(q_filled.index(0), increment_count=False)
        for start_n in range(0, end, BLOCK_N):
            stage = step % STAGES
            barrier = filled.index(stage)
            wait_until_free(free, step)
            has_values = start_n > 0
            mbarrier.expect(barrier, 2 * NBYTES, pred=has_values)
            mbarrier.expect(barrier, NBYTES, pred=start_n == 0)
            mbarrier.arrive(barrier, count=COPYING_THREADS - 1)
            at = origin + start_n
            gluon_copies.tma_load(key_rows, [at, head * HEAD_DIM], barrier, k_stages.index(stage))
            gluon_copies.tma_load(
                value_rows, [at - BLOCK_N, head * HEAD_DIM], barrier, v_stages.index(stage), pred=has_values
            )
            step += 1
        last = (end - 1) // BLOCK_N * BLOCK_N
        at = (origin + last + runs).to(gl.int64) * (KV_HEADS * HEAD_DIM)
        wait_until_free(free, step)
        copy_block(
            values, at, last + runs, last, 0, end, last + BLOCK_N <= end, head, v_stages.index(step % STAGES),
            KV_HEADS, False, layout,
        )  # fmt: skip
        async_copy.mbarrier_arrive(filled.index(step % STAGES), increment_count=False)
        step += 1
        item, sequence, first_position = next_item, next_sequence, next_first_position
        row, tokens = next_row, next_tokens


@gluon.jit
def _advance(
    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """Compute a step that is not the last; qk: scores of the previous step, of the block from `start_n` on."""
    acc, qk, m_i, l_i = start_step(
        q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
        WINDOWED, SOFTCAP, LOADED,
    )  # fmt: skip
    acc, qk = warpgroup_mma_wait(0, deps=[acc, qk])
    free = shared[6]
    mbarrier.arrive(free.index(step % free.shape[0]), count=1)
    return acc, qk, m_i, l_i


@gluon.jit
def _attend(
    arguments, shared, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, tiles, order, sinks, out_stride, scale, softcap, window, value_scale, items = arguments
    q_halves, k_stages, v_stages, q_filled, q_free, filled, free = shared
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    STAGES: gl.constexpr = k_stages.shape[0]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    HALF_M: gl.constexpr = q_halves.shape[1]
    qk_layout: gl.constexpr = product_layout(BLOCK_N, 16)
    q = q_halves.index(HALF)
    rows = HALF * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, qk_layout))
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, qk_layout)
    programs = gl.num_programs(0)
    item = ordered_item(order, 0, items, programs)
    _, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(ordered_turns(order, items, programs)):
        head = item % KV_HEADS
        begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
        end = first_position + tokens
        last, whole = key_ranges(begin, end, first_position, BLOCK_N, HALF * HALF_M // GROUP_SIZE)
        q_positions = first_position + rows // GROUP_SIZE
        m_i, l_i, acc = begin_rows(zeros, HEAD_DIM)

        wait_until_filled(q_filled, turn)
        wait_for_stage(filled, step)
        qk = start_scores(q, k_stages, step, zeros)
        # Loaded here, so that the product hides the latency.
        next_item = ordered_item(order, turn + 1, items, programs)
        _, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        qk = warpgroup_mma_wait(0, deps=[qk])
        mbarrier.arrive(free.index(step % STAGES), count=1)
        step += 1
        if WINDOWED:
            for start_n in range(begin, last, BLOCK_N):
                needs_mask = (start_n >= whole) | (start_n < end - window)
                acc, qk, m_i, l_i = _advance(
                    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
                    WINDOWED, SOFTCAP, LOADED,
                )  # fmt: skip
                step += 1
        else:
            for start_n in range(begin, whole, BLOCK_N):
                acc, qk, m_i, l_i = _advance(
                    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, False,
                    WINDOWED, SOFTCAP, LOADED,
                )  # fmt: skip
                step += 1
            for start_n in range(whole, last, BLOCK_N):
                acc, qk, m_i, l_i = _advance(
                    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, True,
                    WINDOWED, SOFTCAP, LOADED,
                )  # fmt: skip
                step += 1
        mbarrier.arrive(q_free.index(0), count=1)
        p, acc, m_i, l_i = soften(qk, acc, m_i, l_i, q_positions, last, scale, softcap, window, True, WINDOWED, SOFTCAP)
        l_i = total(l_i, m_i, sinks, rows, head, GROUP_SIZE, SINKS)
        left = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        wait_for_stage(filled, step)
        stage = step % STAGES
        acc = warpgroup_mma(left, v_stages.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage), count=1)
        step += 1

        store_rows(
            out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF, GROUP_SIZE,
            has_short_offsets(GROUP_SIZE, HEAD_DIM, LOADED),
        )  # fmt: skip
        item, first_position, row, tokens = next_item, next_first_position, next_row, next_tokens


@gluon.jit(do_not_specialize=["table_stride", "window", "items"])
def _prefill_kernel(
    q, keys, values, tables, tiles, out, sinks, q_stride, out_stride, table_stride, scale, softcap, window, value_scale,
    items, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, ACROSS_TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """tiles: if ACROSS_TILES, a schedule, whose columns are programs; items: otherwise, tiles times KV_HEADS.

    Grid: programs, at most one per item. Other arguments as in paged_prefill.
    """
    BUFFERS: gl.constexpr = 2 if ACROSS_TILES else 1
    shared = make_stages(q.dtype.element_ty, BUFFERS, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES)
    if not ACROSS_TILES:
        wait(PDL)
    release(PDL)
    # Registers per thread: 224 and 56; the first group gets the rest, 224 too.
    if ACROSS_TILES:
        across = (out, tiles, sinks, out_stride, scale, softcap, window, value_scale)
        copied_across = (q, keys, values, tables, tiles, q_stride, table_stride, window)
        gl.warp_specialize(
            [
                (attend_across_tiles, (across, shared, 0, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
                (attend_across_tiles, (across, shared, 1, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
                (copy_across_tiles, (copied_across, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE, WINDOWED, PDL)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        attended = (out, tiles, None, sinks, out_stride, scale, softcap, window, value_scale, items)
        copied = (q, keys, values, tables, tiles, None, q_stride, table_stride, window, items)
        gl.warp_specialize(
            [
                (_attend, (attended, shared, 0, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS, False)),
                (_attend, (attended, shared, 1, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS, False)),
                (_copy, (copied, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE, WINDOWED)),
            ],
            [4, 4],
            [224, 56],
        )


@gluon.jit(do_not_specialize=["table_stride", "items"])
def _ordered_kernel(
    q, keys, values, key_rows, value_rows, tables, tiles, order, out, sinks, q_stride, out_stride, table_stride, scale,
    softcap, value_scale, items, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, LOADED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """_prefill_kernel without a window, in the order of `order`: [turns, programs].

    key_rows, value_rows: if LOADED, descriptors of [tokens of the cache, KV_HEADS * HEAD_DIM]. A kernel of its own,
    since more arguments change how ptxas arranges the other one.
    """
    shared = make_stages(q.dtype.element_ty, 1, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES)
    wait(PDL)
    release(PDL)
    attended = (out, tiles, order, sinks, out_stride, scale, softcap, 0, value_scale, items)
    if LOADED:
        copied = (q, values, key_rows, value_rows, tables, tiles, order, q_stride, table_stride, items)
        gl.warp_specialize(
            [
                (_attend, (attended, shared, 0, KV_HEADS, GROUP_SIZE, False, SOFTCAP, SINKS, True)),
                (_attend, (attended, shared, 1, KV_HEADS, GROUP_SIZE, False, SOFTCAP, SINKS, True)),
                (_load, (copied, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        copied = (q, keys, values, tables, tiles, order, q_stride, table_stride, 0, items)
        gl.warp_specialize(
            [
                (_attend, (attended, shared, 0, KV_HEADS, GROUP_SIZE, False, SOFTCAP, SINKS, False)),
                (_attend, (attended, shared, 1, KV_HEADS, GROUP_SIZE, False, SOFTCAP, SINKS, False)),
                (_copy, (copied, shared, KV_HEADS, GROUP_SIZE, BLOCK_SIZE, False)),
            ],
            [4, 4],
            [224, 56],
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
    order: torch.Tensor | None = None,
    consecutive: bool = False,
    config: PrefillConfig,
) -> None:
    """Launch the kernel with the arguments of paged_prefill, where `can_persist` says what is supported."""
    if config.across_tiles != (tiles.dim() == 3):
        wanted = "a schedule of prefill_schedule" if config.across_tiles else "tiles of prefill_tiles"
        raise ValueError(
            f"paged_prefill was called with tiles of shape {list(tiles.shape)}, but its config needs {wanted}"
        )
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    items = len(tiles) * num_kv_heads
    inputs = (q, keys, values)
    sizes: dict[str, Any] = {
        "KV_HEADS": num_kv_heads,
        "GROUP_SIZE": q.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        **dependent_launch(q.device),
    }
    outputs = (out, out if sinks is None else sinks, q.stride(0), out.stride(0), tables.stride(0))
    factors = (scale, softcap or 0.0)
    # With a window the tiles have other amounts of work, and behind the window are blocks of other sequences.
    if order is not None and window is None and not config.across_tiles:
        rows: Any = (keys, values)
        if consecutive:
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            flat = (part.view(-1, num_kv_heads * head_dim) for part in rows)
            rows = tuple(TensorDescriptor.from_tensor(part, [config.block_n, head_dim], layout) for part in flat)
        _ordered_kernel[(order.shape[1],)](
            *(*inputs, *rows, tables, tiles, order, *outputs, *factors, value_scale, items),
            LOADED=consecutive,
            **sizes,
        )
        return
    programs = tiles.shape[1] if config.across_tiles else min(items, num_sms(q.device))
    _prefill_kernel[(programs,)](
        *(*inputs, tables, tiles, *outputs, *factors, window or 0, value_scale, items),
        WINDOWED=window is not None,
        ACROSS_TILES=config.across_tiles,
        **sizes,
    )
