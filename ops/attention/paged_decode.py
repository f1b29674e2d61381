"""Decode attention: one query per sequence over the paged KV cache, in one kernel without a host-side plan.

The work is a list of tiles: BLOCK_N consecutive key positions of a sequence, all sequences in order. For each KV head,
the list is divided into equal contiguous ranges, one per program (as in Stream-K, Osama et al. 2023). Programs compute
their ranges from the context lengths on the device. One captured CUDA graph therefore suits every batch, and ragged
batches are balanced. If a sequence lies within a range, its program writes the result. If a sequence crosses ranges,
the programs leave partial results in a workspace, and the last of them to finish merges the parts (paged_decode_merge).

A program with the end of one sequence and the start of another finishes late, because it fills its pipeline twice. If
there are few sequences, the list is therefore padded so that each of them starts at the start of a range, unless that
makes all ranges much longer. Merging takes 2 to 3 us. If there is a program for each sequence, and the longest is not
much longer than a range, each sequence is therefore one range.

A program fills its pipeline at the start of each sequence. Where ranges have tiles of several sequences, the list
therefore has `start_tiles` more entries before the tiles of each sequence: a range with many short contexts, as where
they are in the order of their lengths, has fewer tiles.

The query heads of a KV head are the rows (M) of the matrix products, so keys and values are read once for all of them.
A float8 cache with 16-bit queries has its own loop (paged_decode_float8) and launch parameters (paged_decode_config).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.attention.common import add_sinks, as_type, capped, score_factor
from engine.ops.attention.paged_decode_config import FLOAT8_MIN_M, MIN_M, DecodeConfig
from engine.ops.attention.paged_decode_float8 import attend_float8
from engine.ops.attention.paged_decode_merge import DecodeWorkspace, merge_parts, merge_size
from engine.ops.attention.paged_decode_rotation import NewTokens, begin_sequence
from engine.ops.attention.rope_and_cache import FLOAT8_MAX
from engine.ops.common.launch import dependent_launch, prefetch_lines_where, release, wait

MIN_PARTS = tl.constexpr(4)
"""With at least this many programs per sequence, ranges may be padded, so that none has tiles of two sequences."""
WHOLE_RATIO = tl.constexpr(4)
"""Where sequences are not divided, ranges are up to this many times as long as they would be otherwise."""
MANY_PARTS = tl.constexpr(16)
"""If the longest sequence would have more parts than this, ranges have at least MIN_TILES tiles."""
LINE_BYTES = tl.constexpr(128)
"""Size of a line of the L2 cache."""


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sequences: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    new: NewTokens | None = None,
) -> None:
    """Compute attention for the first `num_sequences` rows of q into the same rows of out.

    q, out: [rows, heads, head_dim], last two dimensions dense;
    keys, values: [blocks, block_size, kv_heads, head_dim];
    tables: [sequences, max_blocks] int32;
    context_lens: [sequences] int32, at least 1: number of positions that the query sees, its own (the last) included;
    tables and context_lens are read before the preceding kernel has ended: see ops/common/launch.py;
    value_scale: factor on the values;
    sinks: [heads] float32, the score of one more key of each head, whose value is zero;
    new: q is the query heads of packed projections (rotate_and_write's `qkv`), which stay as they are: the kernel norms
    and rotates heads, and writes the new keys and values to the cache, where `rotates_within_decode`. It reads older
    positions before the preceding kernel has ended. No row may see a position that another row of the batch writes.
    """
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    num_kv_heads, folded_dim = num_kv_heads // config.fold, head_dim * config.fold
    group = q.shape[1] // num_kv_heads
    programs = len(workspace.arrivals)
    float8 = keys.dtype == torch.float8_e4m3fn and q.dtype.itemsize == 2
    registers = config.max_registers()
    limited = float8 or registers < 255
    _decode_kernel[(programs * num_kv_heads,)](
        q,
        keys,
        values,
        tables,
        context_lens,
        out,
        workspace.acc,
        workspace.stats,
        workspace.arrivals,
        out if sinks is None else sinks,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        num_sequences,
        programs,
        scale,
        softcap or 0.0,
        window or 0,
        value_scale,
        None if new is None else new.slots,
        None if new is None else new.cos,
        None if new is None else new.sin,
        None if new is None else new.weight,
        None if new is None else new.eps,
        None if new is None else new.key_scale,
        KV_HEADS=num_kv_heads,
        GROUP_SIZE=group,
        FOLDED_DIM=folded_dim,
        FOLD=config.fold,
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        BLOCK_N=config.block_n,
        BLOCK_B=pad_sequences(num_sequences),
        BLOCK_M=max(FLOAT8_MIN_M if float8 else MIN_M, triton.next_power_of_2(group)),
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_D=triton.next_power_of_2(folded_dim),
        MERGE_SIZE=merge_size(group, head_dim, config),
        EXTRA_TILES=config.extra_tiles,
        MIN_TILES=config.min_tiles,
        START_TILES=config.start_tiles,
        FLOAT8=float8,
        NEW=new is not None,
        INTERLEAVED=new is not None and new.interleaved,
        FLOAT8_MAX=FLOAT8_MAX if new is not None and keys.dtype == torch.float8_e4m3fn else 0.0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"maxnreg": registers} if limited and q.is_cuda and torch.version.hip is None else {}),
        **dependent_launch(q.device),
    )


def pad_sequences(count: int) -> int:
    """Pad the number of sequences to one of few sizes, since a kernel is compiled for each.

    32 are one per thread of a warp. Decode graphs of 24 and of 32 sequences use this size, so that the start most
    likely compiles it for each of the launch parameters up to there.
    """
    return 32 if count <= 32 else max(256, triton.next_power_of_2(count))


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "num_programs", "window"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    acc_ptr,
    stats_ptr,
    arrivals_ptr,
    sinks_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_sequences,
    num_programs,
    scale,
    softcap,
    window,
    value_scale,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    norm_eps,
    key_scale,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FOLDED_DIM: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_SIZE: tl.constexpr,
    EXTRA_TILES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    START_TILES: tl.constexpr,
    FLOAT8: tl.constexpr,
    NEW: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    # KV_HEADS, GROUP_SIZE and FOLDED_DIM describe folded heads: `head` stands for FOLD adjacent KV heads.
    # Heads change fastest: programs that run together read the same positions, which are adjacent in memory.
    head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(0) // KV_HEADS
    offs_b = tl.arange(0, BLOCK_B)
    context_lens = tl.load(context_lens_ptr + offs_b, mask=offs_b < num_sequences, other=0)
    tile_counts = tl.cdiv(context_lens, BLOCK_N) - _first_tile(context_lens, window, WINDOWED, BLOCK_N)
    num_tiles = tl.sum(tile_counts, 0)
    longest = tl.max(tile_counts, 0)
    tiles_per_program = tl.cdiv(num_tiles, num_programs)
    if MIN_TILES > 1:
        tiles_per_program = tl.maximum(tiles_per_program, tl.minimum(tl.cdiv(longest, MANY_PARTS), MIN_TILES))
    whole_tiles = tl.minimum(tiles_per_program + EXTRA_TILES, tiles_per_program * WHOLE_RATIO)
    start_tiles = num_tiles * 0 + START_TILES
    if (num_sequences <= num_programs) & (longest <= whole_tiles):
        # One range per sequence, so that nothing is merged.
        tiles_per_program = longest
        tile_counts = tl.minimum(tile_counts, 1) * longest
        num_tiles = num_sequences * longest
        start_tiles = 0
    elif num_sequences * MIN_PARTS <= num_programs:
        # Pad every sequence to whole ranges, as short as the number of programs allows, or nearly; but not if that
        # makes ranges more than a quarter longer.
        range_tiles = tiles_per_program
        while tl.sum(tl.cdiv(tile_counts, range_tiles), 0) > num_programs:
            range_tiles += tl.cdiv(range_tiles, 32)
        if range_tiles * 4 <= tiles_per_program * 5:
            tiles_per_program = range_tiles
            tile_counts = tl.cdiv(tile_counts, tiles_per_program) * tiles_per_program
            num_tiles = tl.sum(tile_counts, 0)
            start_tiles = 0
    if START_TILES > 0:
        tile_counts += tl.minimum(tile_counts, 1) * start_tiles
        num_tiles = tl.sum(tile_counts, 0)
        tiles_per_program = tl.maximum(tiles_per_program, tl.cdiv(num_tiles, num_programs))
    tile_ends = tl.cumsum(tile_counts, 0)
    range_start = program * tiles_per_program
    range_end = tl.minimum(range_start + tiles_per_program, num_tiles)
    precedes = tile_ends <= range_start
    first_sequence = tl.sum(precedes.to(tl.int32), 0)
    # Index in the list of the current sequence's first tile, after those that stand for its start.
    tile_offset = tl.sum(tl.where(precedes, tile_counts, 0), 0) + start_tiles
    # The last of those whose first tile precedes the end: before `first_sequence` if the range has only starts.
    begins = (tile_counts > 0) & (tile_ends - tile_counts + start_tiles < range_end)
    last_sequence = tl.sum(begins.to(tl.int32), 0) - 1
    if PDL and not NEW:  # noqa: SIM102 - a constant
        # While the preceding kernel ends. It may write to the cache: the L2 cache holds what it writes.
        if range_start < num_tiles:
            context_len = tl.load(context_lens_ptr + first_sequence)
            first_tile = _first_tile(context_len, window, WINDOWED, BLOCK_N)
            _prefetch_tile(
                k_cache_ptr, v_cache_ptr, block_tables_ptr + first_sequence * table_stride, head,
                first_tile + tl.maximum(range_start - tile_offset, 0), context_len, window, KV_HEADS, FOLDED_DIM,
                BLOCK_SIZE, WINDOWED, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    if not NEW:  # else begin_sequence waits
        wait(PDL)  # context_lens and block_tables may be read before: see ops/common/launch.py
        release(PDL)
    if range_start < num_tiles:
        offs_m = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        offs_n = tl.arange(0, BLOCK_N)
        q_mask = offs_m[:, None] < GROUP_SIZE
        if BLOCK_D != FOLDED_DIM:
            q_mask = q_mask & (offs_d[None, :] < FOLDED_DIM)
        HEAD_DIM: tl.constexpr = FOLDED_DIM // FOLD
        q_dims = offs_d
        if FOLD != 1:  # a query head has only the dimensions of its own KV head; the others are zero and not stored
            q_mask = q_mask & (offs_m[:, None] // (GROUP_SIZE // FOLD) == offs_d[None, :] // HEAD_DIM)
            q_dims = offs_d % HEAD_DIM
        offs_head = head * FOLDED_DIM + offs_d[None, :]
        factor = score_factor(scale, SOFTCAP)

        for sequence in range(first_sequence, last_sequence + 1):
            context_len = tl.load(context_lens_ptr + sequence)
            block_table_ptr = block_tables_ptr + sequence * table_stride
            # Tiles from `start` to `stop` of the sequence's `tile_count` visible tiles are in this program's range.
            first_tile = _first_tile(context_len, window, WINDOWED, BLOCK_N)
            tile_count = tl.cdiv(context_len, BLOCK_N) - first_tile
            start = tl.maximum(range_start - tile_offset, 0)
            stop = tl.minimum(range_end - tile_offset, tile_count)

            seen_len, seen_window = context_len, window
            if NEW:
                # The loop does not read the last position, and starts before the preceding kernel has ended.
                seen_len, seen_window = context_len - 1, window - 1
                q = tl.zeros([BLOCK_M, BLOCK_D], q_ptr.dtype.element_ty)
                HALF: tl.constexpr = HEAD_DIM // 2
                row_cos = cos_ptr if cos_ptr is None else cos_ptr + sequence * HALF
                row_sin = sin_ptr if sin_ptr is None else sin_ptr + sequence * HALF
            else:
                offs_q = (head * GROUP_SIZE + offs_m[:, None]) * HEAD_DIM + q_dims[None, :]
                q = tl.load(q_ptr + sequence * q_stride + offs_q, mask=q_mask, other=0.0)
            if FLOAT8:
                acc, m_i, l_i = attend_float8(
                    q, k_cache_ptr, v_cache_ptr, block_table_ptr, head, first_tile + start, first_tile + stop,
                    context_len, window, scale, softcap, KV_HEADS, FOLDED_DIM, BLOCK_SIZE, WINDOWED, SOFTCAP,
                    BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
            else:
                m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
                l_i = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

                # Cache blocks are looked up one iteration early, so that loads of keys do not wait for the block table.
                k_positions = (first_tile + start) * BLOCK_N + offs_n
                block_ids = tl.load(block_table_ptr + k_positions // BLOCK_SIZE, mask=k_positions < seen_len, other=0)
                for tile in range(first_tile + start, first_tile + stop):
                    k_positions = tile * BLOCK_N + offs_n
                    slots = block_ids.to(tl.int64) * BLOCK_SIZE + k_positions % BLOCK_SIZE
                    next_positions = k_positions + BLOCK_N
                    block_ids = tl.load(
                        block_table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < seen_len, other=0
                    )

                    # Other slots may hold NaN, which a weight of 0 does not cancel.
                    kv_mask = k_positions[:, None] < seen_len
                    if WINDOWED:
                        kv_mask = kv_mask & (k_positions[:, None] >= seen_len - seen_window)
                    if BLOCK_D != FOLDED_DIM:
                        kv_mask = kv_mask & (offs_d[None, :] < FOLDED_DIM)
                    at = slots[:, None] * (KV_HEADS * FOLDED_DIM) + offs_head
                    k = as_type(tl.load(k_cache_ptr + at, mask=kv_mask, other=0.0), q.dtype)
                    v = as_type(tl.load(v_cache_ptr + at, mask=kv_mask, other=0.0), q.dtype)

                    if NEW:  # noqa: SIM102 - a constant
                        if tile == first_tile + start:
                            q, acc, m_i, l_i = begin_sequence(
                                q_ptr + sequence * q_stride, k_cache_ptr, v_cache_ptr, slots_ptr + sequence, row_cos,
                                row_sin, norm_ptr, norm_eps, key_scale, value_scale, head, stop == tile_count, scale,
                                softcap, factor, KV_HEADS, GROUP_SIZE, FOLD, HEAD_DIM, BLOCK_M, INTERLEAVED, SOFTCAP,
                                FLOAT8_MAX, PDL,
                            )  # fmt: skip
                    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
                    if SOFTCAP:
                        qk = capped(qk * scale, softcap)
                    visible = k_positions < seen_len
                    if WINDOWED:
                        visible = visible & (k_positions >= seen_len - seen_window)
                    qk = tl.where(visible[None, :], qk, float("-inf"))

                    # Every tile has a visible position, so m_new is finite.
                    m_new = tl.maximum(m_i, tl.max(qk, 1) * factor)
                    p = tl.exp2(qk * factor - m_new[:, None])
                    alpha = tl.exp2(m_i - m_new)
                    l_i = l_i * alpha + tl.sum(p, 1)
                    acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
                    m_i = m_new

            result_ptr = out_ptr + sequence * out_stride + head * GROUP_SIZE * HEAD_DIM
            if (start == 0) & (stop == tile_count):
                if SINKS:
                    l_i = add_sinks(l_i, m_i, sinks_ptr + head * GROUP_SIZE, offs_m, GROUP_SIZE)
                result = (acc / l_i[:, None] * value_scale).to(out_ptr.dtype.element_ty)
                tl.store(result_ptr + offs_m[:, None] * HEAD_DIM + q_dims[None, :], result, mask=q_mask)
            else:
                part = (program * 2 + (start == 0).to(tl.int32)) * KV_HEADS + head
                tl.store(acc_ptr + (part * GROUP_SIZE + offs_m[:, None]) * HEAD_DIM + q_dims[None, :], acc, mask=q_mask)
                tl.store(stats_ptr + part * 2 * GROUP_SIZE + offs_m, m_i, mask=offs_m < GROUP_SIZE)
                tl.store(stats_ptr + (part * 2 + 1) * GROUP_SIZE + offs_m, l_i, mask=offs_m < GROUP_SIZE)
                # The barrier orders all threads' stores before the atomic, which releases them to the other programs
                # and acquires theirs.
                tl.debug_barrier()
                first_program = tile_offset // tiles_per_program
                num_parts = (tile_offset + tile_count - 1) // tiles_per_program - first_program + 1
                arrivals = arrivals_ptr + first_program * KV_HEADS + head
                if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                    tl.debug_barrier()
                    merge_parts(
                        acc_ptr, stats_ptr, result_ptr, sinks_ptr, first_program, num_parts, head, value_scale,
                        KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D // FOLD, MERGE_SIZE, SINKS,
                    )  # fmt: skip
                    tl.store(arrivals, 0)
            tile_offset += tile_count + start_tiles


@triton.jit
def _first_tile(context_lens, window, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Index of the tile with the first visible position."""
    first = context_lens * 0
    if WINDOWED:
        first = tl.maximum(context_lens - window, 0) // BLOCK_N
    return first


@triton.jit
def _prefetch_tile(
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    head,
    tile,
    context_len,
    window,
    KV_HEADS: tl.constexpr,
    FOLDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Prefetch the visible keys and values of a tile into the L2 cache."""
    LINE: tl.constexpr = min(BLOCK_D, LINE_BYTES * 8 // k_cache_ptr.dtype.element_ty.primitive_bitwidth)
    k_positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D // LINE) * LINE
    visible = k_positions < context_len
    if WINDOWED:
        visible = visible & (k_positions >= context_len - window)
    block_ids = tl.load(block_table_ptr + k_positions // BLOCK_SIZE, mask=visible, other=0)
    slots = block_ids.to(tl.int64) * BLOCK_SIZE + k_positions % BLOCK_SIZE
    at = slots[:, None] * (KV_HEADS * FOLDED_DIM) + head * FOLDED_DIM + offs_d[None, :]
    mask = visible[:, None] & (offs_d < FOLDED_DIM)[None, :]
    prefetch_lines_where(mask, k_cache_ptr + at)
    prefetch_lines_where(mask, v_cache_ptr + at)
