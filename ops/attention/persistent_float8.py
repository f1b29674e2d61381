"""Prefill attention in float8 for Hopper: both matrix products of float8_e4m3fn, over tiles of a float8 KV cache.

Programs, groups of warps, steps and turns are those of persistent_prefill. Keys and values come from float8_tiles by
TMA: the values are transposed there, and ordered such that weights move between no threads. Everything that is not a
matrix product is in float32.

- Queries are quantized where they are loaded, with one scale per query head of a token: its largest magnitude over 448.
- Weights of the softmax are 256 times exp(score - maximum), so that weights down to 2^-14 of the largest keep all
  digits. Their sum, in float32 and before rounding, has the same factor.
- Hopper adds float8 products with about 14 bits. Only the sums over head_dim and over the 128 keys of a tile are
  computed so; sums over tiles are in float32 ("two-level accumulation", Zhang et al. 2024, SageAttention2).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.attention.common import capped
from engine.ops.attention.float8_tiles import TILE
from engine.ops.attention.persistent_stages import (
    add_sink,
    make_barriers,
    product_layout,
    start_scores,
    wait_until_filled,
    wait_until_free,
)
from engine.ops.attention.persistent_steps import (
    find_first_key,
    item_of_turn,
    key_ranges,
    masked,
    store_rows,
    tile_of_item,
)
from engine.ops.common import gluon_copies
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

BLOCK_M = 128
"""Rows per tile of queries, a row being one query head of one token."""
STAGES = 4
"""Blocks of keys and values in flight or in use."""
_QUANTIZED_ROWS = gl.constexpr(32)  # rows of queries that are quantized together, so that they fit into registers
_LOG2_P_SCALE = gl.constexpr(8.0)  # log2 of the factor on weights


@gluon.jit
def _quantize_queries(q, q_stride, part, scales, row, tokens, head, GROUP_SIZE: gl.constexpr):
    """Quantize a tile's queries into `part`, [BLOCK_M, HEAD_DIM], and store `scales`, [BLOCK_M]; zeros beyond the
    tile's tokens."""
    ROWS: gl.constexpr = part.shape[0]
    HEAD_DIM: gl.constexpr = part.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    for begin in gl.static_range(0, ROWS, _QUANTIZED_ROWS):
        rows = begin + gl.arange(0, _QUANTIZED_ROWS, gl.SliceLayout(1, layout))
        offs = (row + rows // GROUP_SIZE).to(gl.int64) * q_stride + (head * GROUP_SIZE + rows % GROUP_SIZE) * HEAD_DIM
        inside = gl.expand_dims(rows < tokens * GROUP_SIZE, 1)
        queries = gl.load(q + gl.expand_dims(offs, 1) + columns, mask=inside, other=0.0).to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(queries), 1), 1e-30) / 448.0
        queries = queries * gl.expand_dims(1.0 / scale, 1)
        part.slice(begin, _QUANTIZED_ROWS).store(queries.to(part.dtype))
        scales.slice(begin, _QUANTIZED_ROWS).store(scale)


@gluon.jit
def _load(
    arguments, shared, scales, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, WINDOWED: gl.constexpr
):  # fmt: skip
    """The warps that load queries, keys and values into shared memory."""
    q, keys, values, tiles, q_stride, window, items = arguments
    q_tiles, k_stages, v_stages, q_filled, q_free, filled, free, _ = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    NBYTES: gl.constexpr = keys.block_type.nbytes
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    programs = gl.num_programs(0)
    item = item_of_turn(0, programs)
    origin, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(gl.cdiv(items, programs)):
        next_item = item_of_turn(turn + 1, programs)
        next_origin, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        if item < items:
            head = item % KV_HEADS
            begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
            end = first_position + tokens
            wait_until_free(q_free, turn)
            _quantize_queries(
                q, q_stride, q_tiles.index(turn % 2), scales.index(turn % 2), row, tokens, head, GROUP_SIZE
            )
            fence_async_shared()
            mbarrier.arrive(q_filled.index(turn % 2), count=1)
            place = (origin + begin // BLOCK_N) * KV_HEADS + head
            for start_n in range(begin, end + BLOCK_N, BLOCK_N):
                stage = step % STAGES
                barrier = filled.index(stage)
                wait_until_free(free, step)
                has_values = start_n > begin
                has_keys = start_n < end
                both = has_values & has_keys
                mbarrier.expect(barrier, 2 * NBYTES, pred=both)
                mbarrier.expect(barrier, NBYTES, pred=both == 0)
                at = [(place - KV_HEADS) * HEAD_DIM, 0]
                gluon_copies.tma_load(values, at, barrier, v_stages.index(stage), pred=has_values)
                gluon_copies.tma_load(keys, [place * BLOCK_N, 0], barrier, k_stages.index(stage), pred=has_keys)
                place += KV_HEADS
                step += 1
        item, origin, first_position = next_item, next_origin, next_first_position
        row, tokens = next_row, next_tokens


@gluon.jit
def _begin_step(shared, step, HALF: gl.constexpr):
    """Wait for the step's stage and for the turn of this half; return the stage."""
    _, k_stages, _, _, _, filled, _, turn_barriers = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    wait_until_filled(filled, step)
    mbarrier.wait(turn_barriers.index(HALF), (step & 1) ^ (1 - HALF))
    return step % STAGES


@gluon.jit
def _soften(
    qk, m_i, l_i, q_positions, start_n, scale, softcap, window, needs_mask,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Online softmax as in persistent_prefill, with a scale per row; p, to be rounded to float8, and l_i are 256 times
    as large."""
    factor = scale * 1.4426950408889634
    if SOFTCAP:
        qk = capped(qk * gl.expand_dims(scale, 1), softcap)
        factor = gl.full(scale.shape, 1.4426950408889634, gl.float32, scale.type.layout)
    if needs_mask:
        qk = masked(qk, q_positions, start_n, window, WINDOWED)
    m_new = gl.maximum(m_i, gl.max(qk, 1) * factor)
    p = gl.exp2(qk * gl.expand_dims(factor, 1) - gl.expand_dims(m_new - _LOG2_P_SCALE, 1))
    alpha = gl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _operand(p, acc):
    """Weights in float8 as the left operand of the product with values, whose keys are in the order of float8_tiles."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    narrow = p.to(gl.float8e4nv).reshape((ROWS, KEYS // 16, 2, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((ROWS, KEYS))
    return gl.convert_layout(narrow, layout, assert_trivial=True)


@gluon.jit
def _advance(
    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
    HALF: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Compute a step that is not the last; qk: scores of the previous step, of the block from `start_n` on."""
    _, k_stages, v_stages, _, _, _, free, turn_barriers = shared
    qk_layout: gl.constexpr = qk.type.layout
    acc_layout: gl.constexpr = acc.type.layout
    p, m_i, l_i, alpha = _soften(
        qk, m_i, l_i, q_positions, start_n, scale, softcap, window, needs_mask, WINDOWED, SOFTCAP
    )
    left = _operand(p, acc)
    no_scores = gl.zeros(qk.shape, gl.float32, qk_layout)
    no_sums = gl.zeros(acc.shape, gl.float32, acc_layout)
    stage = _begin_step(shared, step, HALF)
    values = v_stages.index(stage).permute((1, 0))
    pv = warpgroup_mma(left, values, no_sums, use_acc=False, is_async=True)
    qk = start_scores(q, k_stages, step, no_scores)
    mbarrier.arrive(turn_barriers.index(1 - HALF), count=1)
    pv = warpgroup_mma_wait(1, deps=[pv])
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), 1) + pv
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(free.index(stage), count=1)
    return acc, qk, m_i, l_i


@gluon.jit
def _attend(
    arguments, shared, scales, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; HALF: 0 for the first half of a tile's rows, 1 for the second."""
    out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items = arguments
    q_tiles, k_stages, v_stages, q_filled, q_free, _, free, turn_barriers = shared
    BLOCK_N: gl.constexpr = k_stages.shape[1]
    HEAD_DIM: gl.constexpr = k_stages.shape[2]
    HALF_M: gl.constexpr = q_tiles.shape[1] // 2
    qk_layout: gl.constexpr = product_layout(BLOCK_N, 32)
    acc_layout: gl.constexpr = product_layout(HEAD_DIM, 32)
    row_layout: gl.constexpr = gl.SliceLayout(1, qk_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    rows = HALF * HALF_M + gl.arange(0, HALF_M, row_layout)
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, qk_layout)
    programs = gl.num_programs(0)
    item = item_of_turn(0, programs)
    _, first_position, row, tokens = tile_of_item(tiles, item, items, KV_HEADS)
    step = 0
    for turn in range(gl.cdiv(items, programs)):
        next_item = item_of_turn(turn + 1, programs)
        _, next_first_position, next_row, next_tokens = tile_of_item(tiles, next_item, items, KV_HEADS)
        if item < items:
            head = item % KV_HEADS
            begin = find_first_key(first_position, window, WINDOWED) // BLOCK_N * BLOCK_N
            end = first_position + tokens
            last, whole = key_ranges(begin, end, first_position, BLOCK_N, HALF * HALF_M // GROUP_SIZE)
            q_positions = first_position + rows // GROUP_SIZE
            # Finite, so that a row that sees no key of a block does not compute inf - inf.
            m_i = gl.full([HALF_M], -1e30, gl.float32, row_layout)
            l_i = gl.zeros([HALF_M], gl.float32, row_layout)
            acc = gl.zeros([HALF_M, HEAD_DIM], gl.float32, acc_layout)

            wait_until_filled(q_filled, turn)
            q = q_tiles.index(turn % 2).slice(HALF * HALF_M, HALF_M)
            row_scale = scales.index(turn % 2).slice(HALF * HALF_M, HALF_M).load(row_layout) * scale
            stage = _begin_step(shared, step, HALF)
            qk = start_scores(q, k_stages, step, zeros)
            mbarrier.arrive(turn_barriers.index(1 - HALF), count=1)
            qk = warpgroup_mma_wait(0, deps=[qk])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
            if WINDOWED:
                for start_n in range(begin, last, BLOCK_N):
                    needs_mask = (start_n >= whole) | (start_n < end - window)
                    acc, qk, m_i, l_i = _advance(
                        q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, row_scale, softcap, window,
                        needs_mask, HALF, WINDOWED, SOFTCAP,
                    )  # fmt: skip
                    step += 1
            else:
                for start_n in range(begin, whole, BLOCK_N):
                    acc, qk, m_i, l_i = _advance(
                        q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, row_scale, softcap, window,
                        False, HALF, WINDOWED, SOFTCAP,
                    )  # fmt: skip
                    step += 1
                for start_n in range(whole, last, BLOCK_N):
                    acc, qk, m_i, l_i = _advance(
                        q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, row_scale, softcap, window,
                        True, HALF, WINDOWED, SOFTCAP,
                    )  # fmt: skip
                    step += 1
            mbarrier.arrive(q_free.index(turn % 2), count=1)
            p, m_i, l_i, alpha = _soften(
                qk, m_i, l_i, q_positions, last, row_scale, softcap, window, True, WINDOWED, SOFTCAP
            )
            if SINKS:
                l_i = add_sink(l_i, m_i - _LOG2_P_SCALE, sinks, rows, head, GROUP_SIZE)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, out_row_layout), 1)
            left = _operand(p, acc)
            no_sums = gl.zeros([HALF_M, HEAD_DIM], gl.float32, acc_layout)
            stage = _begin_step(shared, step, HALF)
            pv = warpgroup_mma(left, v_stages.index(stage).permute((1, 0)), no_sums, use_acc=False, is_async=True)
            mbarrier.arrive(turn_barriers.index(1 - HALF), count=1)
            acc += warpgroup_mma_wait(0, deps=[pv])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1

            store_rows(out, acc, l_i, row, tokens, head, out_stride, value_scale, HALF, GROUP_SIZE, False)
        item, first_position, row, tokens = next_item, next_first_position, next_row, next_tokens


@gluon.jit(do_not_specialize=["window", "items"])
def _prefill_kernel(
    q, keys, values, tiles, out, sinks, q_stride, out_stride, scale, softcap, window, value_scale, items,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """keys, values: descriptors of [tiles * KV_HEADS * BLOCK_N, HEAD_DIM] and [tiles * KV_HEADS * HEAD_DIM, BLOCK_N].

    items: tiles times KV_HEADS. Grid: programs, at most one per item. Other arguments as in `launch`.
    """
    BLOCK_N: gl.constexpr = keys.block_shape[0]
    HEAD_DIM: gl.constexpr = keys.block_shape[1]
    q_tiles = gl.allocate_shared_memory(keys.dtype, [2, BLOCK_M, HEAD_DIM], keys.layout)
    scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_stages = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, HEAD_DIM], keys.layout)
    v_stages = gl.allocate_shared_memory(keys.dtype, [STAGES, HEAD_DIM, BLOCK_N], values.layout)
    q_filled, q_free, filled, free = make_barriers(2, STAGES, 1)
    turn_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Of each group, also the one that loads, one thread arrives for all.
    for number in gl.static_range(2):
        mbarrier.init(turn_barriers.index(number), count=1)
    shared = (q_tiles, k_stages, v_stages, q_filled, q_free, filled, free, turn_barriers)
    wait(PDL)
    release(PDL)
    attended = (out, tiles, sinks, out_stride, scale, softcap, window, value_scale, items)
    loaded = (q, keys, values, tiles, q_stride, window, items)
    gl.warp_specialize(
        [
            (_attend, (attended, shared, scales, 0, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_attend, (attended, shared, scales, 1, KV_HEADS, GROUP_SIZE, WINDOWED, SOFTCAP, SINKS)),
            (_load, (loaded, shared, scales, KV_HEADS, GROUP_SIZE, WINDOWED)),
        ],
        [4, 4],
        [224, 56],  # registers per thread; the first group gets the rest, 224 too
    )


def float8_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute causal attention in float8 for the rows of q that the tiles cover, into the same rows of out.

    q, out: [tokens, heads, head_dim] of a 16-bit dtype, last two dimensions dense;
    keys, values: [tiles, kv_heads, TILE, head_dim] and [tiles, kv_heads, head_dim, TILE], from `gather_tiles`;
    tiles: [tiles, 4] int32, from `prefill_tiles` with BLOCK_M // group tokens, except that the first number is not the
    sequence but the tile of keys that holds its position 0 (negative where the first tiles are behind the window);
    scale, value_scale: factors on the scores and on the values, those of the cache included;
    sinks: [heads] float32, the score of one more key of each head, whose value is zero.
    """
    num_kv_heads, _, head_dim = keys.shape[1:]
    items = len(tiles) * num_kv_heads
    by_keys, by_dims = (gl.NVMMASharedLayout(size, element_bitwidth=8, rank=2) for size in (head_dim, TILE))
    _prefill_kernel[(min(items, num_sms(q.device)),)](
        q,
        TensorDescriptor.from_tensor(keys.view(-1, head_dim), [TILE, head_dim], by_keys),
        TensorDescriptor.from_tensor(values.view(-1, TILE), [head_dim, TILE], by_dims),
        *(tiles, out, out if sinks is None else sinks, q.stride(0), out.stride(0)),
        *(scale, softcap or 0.0, window or 0, value_scale, items),
        KV_HEADS=num_kv_heads,
        GROUP_SIZE=q.shape[1] // num_kv_heads,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        BLOCK_M=BLOCK_M,
        STAGES=STAGES,
        num_warps=4,
        **dependent_launch(q.device),
    )
