"""Prefill attention over the paged KV cache, which holds the new tokens' keys and values already.

A tile is a run of one sequence's new tokens with all query heads of one KV head: these are the rows (M) of the matrix
products, so keys and values are read once for all heads. Tiles are listed on the host (`prefill_tiles`). Keys come in
blocks of BLOCK_N positions with online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). This
kernel runs on any GPU that Triton supports; persistent_prefill has another for GPUs with wgmma.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from engine.ops.attention import persistent_prefill
from engine.ops.attention.common import add_sinks, as_type, capped, score_factor
from engine.ops.attention.paged_prefill_config import PrefillConfig
from engine.ops.common.launch import dependent_launch, release, wait


def prefill_tiles(
    query_lens: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    sequences: npt.NDArray[np.int64],
    tokens: int,
    block_n: int | None = None,
) -> npt.NDArray[np.int32]:
    """List the tiles of `sequences`, `tokens` new tokens at most per tile.

    query_lens, context_lens: of all sequences of the batch; sequences: indices into them. block_n: keys per block; if
    given, the first tile of a sequence has fewer tokens instead of the last, where its tiles then have fewer blocks.
    Returns [tiles, 4]: sequence, position of the tile's first token, its row of q, number of tokens. Tiles that see the
    most keys come first, so that the programs that run last are short.
    """
    counts = -(-query_lens[sequences] // tokens)
    of = np.repeat(np.arange(len(sequences)), counts)
    owners = sequences[of]
    # 0 to count - 1 within each sequence
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = numbers * tokens
    cached = (context_lens - query_lens)[owners]
    if block_n is not None:
        begins -= _find_shift(query_lens[owners], cached, begins, of, tokens, block_n)
    ends = np.minimum(begins + tokens, query_lens[owners])
    begins = np.maximum(begins, 0)
    sizes = ends - begins
    positions = cached + begins
    rows = (np.cumsum(query_lens) - query_lens)[owners] + begins
    order = np.argsort(-(positions + sizes), kind="stable")
    return np.stack([owners, positions, rows, sizes], axis=1)[order].astype(np.int32)


def _find_shift(
    query_lens: npt.NDArray[np.int32],
    cached: npt.NDArray[np.int32],
    begins: npt.NDArray[np.int64],
    of: npt.NDArray[np.int64],
    tokens: int,
    block_n: int,
) -> npt.NDArray[np.int64]:
    """By how many tokens tiles begin earlier: what the last tile of a sequence lacks, where that saves blocks.

    Arguments: of each tile; of: number of its sequence.
    """
    lacking = (-query_lens.astype(np.int64)) % tokens
    last = cached + np.minimum(begins + tokens, query_lens) - 1
    moved = cached + begins + tokens - lacking - 1
    saved = np.bincount(of, last // block_n - moved // block_n)
    return np.where(saved[of] > 0, lacking, 0)


SHORT_SHARE = 0.3
"""Share of the work whose tiles come last: those that see the fewest keys, over all sequences and KV heads."""
MIN_TURNS = 3
"""Minimum tiles per program, times KV heads, for which an order is computed."""
TOLERANCE = 0.02
"""By how much more the busiest program may have to do, so that fewer KV heads are computed at the same time."""
_STEP_KEYS = 128  # keys per step of a tile, of which there is one more than blocks of keys


def prefill_order(
    tiles: npt.NDArray[np.int32], kv_heads: int, programs: int, *, min_turns: int = MIN_TURNS
) -> npt.NDArray[np.int32] | None:
    """Distribute work items, each a tile of `prefill_tiles` and a KV head, over the programs of a persistent kernel.

    Programs that run at the same time read the keys of few sequences and KV heads, which the GPU's cache then holds:
    with sixteen prompts of 2048 tokens, keys and values of eight heads of 128 are 134 MB. Of 1, 2 and all KV heads at a
    time, the first is taken whose busiest program has up to TOLERANCE more work than the mean or the best. In each turn
    the program with the least work so far gets the item with the most.
    Returns [turns, programs]: items, numbered tile * kv_heads + head, and the number of items where there is none; None
    where there are fewer than min_turns items per program.
    """
    count = len(tiles) * kv_heads
    if count < min_turns * programs:
        return None
    work = (-(-(tiles[:, 1] + tiles[:, 3]) // _STEP_KEYS) + 1).astype(np.float64)
    mean = work.sum() * kv_heads / programs
    found = []
    for heads in sorted({1, 2, kv_heads} & set(range(kv_heads + 1))):
        items = _items_in_order(tiles, work, kv_heads, heads)
        most, order = _distribute(items, work[items // kv_heads], programs)
        if most <= mean * (1 + TOLERANCE):
            return order
        found.append((most, order))
    least = min(most for most, _ in found)
    return next(order for most, order in found if most <= least * (1 + TOLERANCE))


def _items_in_order(
    tiles: npt.NDArray[np.int32], work: npt.NDArray[np.float64], kv_heads: int, heads: int
) -> npt.NDArray[np.int64]:
    """Items by sequence, then by groups of `heads` KV heads, then by tile; the shortest tiles of all come last."""
    _, first, sequences = np.unique(tiles[:, 0], return_index=True, return_inverse=True)
    done = np.cumsum(work)
    late = done > (1 - SHORT_SHARE) * done[-1] if heads < kv_heads else np.zeros(len(tiles), bool)
    by_sequence = np.lexsort((first[sequences], late))  # tiles are in order of their keys
    bounds = np.flatnonzero(np.diff(sequences[by_sequence])) + 1
    parts = []
    for part in np.split(by_sequence, bounds):
        for head in range(0, kv_heads, heads):
            parts.append((part[:, None] * kv_heads + np.arange(head, min(head + heads, kv_heads))).ravel())
    return np.concatenate(parts)


def _distribute(
    items: npt.NDArray[np.int64], work: npt.NDArray[np.float64], programs: int
) -> tuple[float, npt.NDArray[np.int32]]:
    """The work of the busiest program, and items by turn and program. work: of the items."""
    order = np.full((-(-len(items) // programs), programs), len(items), np.int32)
    load = np.zeros(programs)
    for turn, row in enumerate(order):
        part = slice(turn * programs, (turn + 1) * programs)
        longest = np.argsort(-work[part], kind="stable")
        idle = np.argsort(load, kind="stable")[: len(longest)]
        row[idle] = items[part][longest]
        load[idle] += work[part][longest]
    return float(load.max()), order


def paged_prefill(
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
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    consecutive: bool = False,
    config: PrefillConfig,
) -> None:
    """Compute causal attention for the rows of q that the tiles cover, into the same rows of out.

    q, out: [tokens, heads, head_dim], last two dimensions dense;
    keys, values: [blocks, block_size, kv_heads, head_dim];
    tables: [sequences, max_blocks] int32; tiles: [tiles, 4] int32, from `prefill_tiles` with config.tokens(group), or,
    if config.across_tiles, [turns + 2, programs, 4], from `prefill_schedule` with at most as many programs as the GPU
    has multiprocessors;
    value_scale: factor on the values;
    sinks: [heads] float32, the score of one more key of each head, whose value is zero;
    order: for persistent_prefill without a window, [turns, programs] int32, from `prefill_order` with at most as many
    programs as the GPU has multiprocessors; None: tiles in their order;
    consecutive: with an order, whether each row of tables numbers consecutive blocks from the sequence's first on.
    """
    if config.persistent:
        persistent_prefill.launch(
            q,
            keys,
            values,
            tables,
            tiles,
            out,
            scale=scale,
            softcap=softcap,
            window=window,
            value_scale=value_scale,
            sinks=sinks,
            order=order,
            consecutive=consecutive,
            config=config,
        )
        return
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    _prefill_kernel[(len(tiles) * num_kv_heads,)](
        q,
        keys,
        values,
        tables,
        tiles,
        out,
        out if sinks is None else sinks,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
        value_scale,
        KV_HEADS=num_kv_heads,
        GROUP_SIZE=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(q.device),
    )


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    tiles_ptr,
    out_ptr,
    sinks_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale,
    softcap,
    window,
    value_scale,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    wait(PDL)
    release(PDL)
    block_table_ptr = block_tables_ptr + tl.load(tiles_ptr + tile * 4).to(tl.int64) * table_stride
    # Positions of the first and last new token of the tile. All rows see the keys from `window_end` to `causal_start`;
    # before, the window hides keys from the last rows; behind, causality hides keys from the first rows.
    first_position = tl.load(tiles_ptr + tile * 4 + 1)
    first_row = tl.load(tiles_ptr + tile * 4 + 2)
    tokens = tl.load(tiles_ptr + tile * 4 + 3)
    last_position = first_position + tokens - 1

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_mask = offs_m < tokens * GROUP_SIZE
    mask = row_mask[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (offs_d[None, :] < HEAD_DIM)
    offs_head = (head * GROUP_SIZE + offs_m % GROUP_SIZE)[:, None] * HEAD_DIM + offs_d[None, :]
    q_rows = (first_row + offs_m // GROUP_SIZE).to(tl.int64)[:, None]
    q = tl.load(q_ptr + q_rows * q_stride + offs_head, mask=mask, other=0.0)

    q_positions = first_position + offs_m // GROUP_SIZE
    causal_start = (first_position + 1) // BLOCK_N * BLOCK_N
    first_key = 0
    window_end = 0
    if WINDOWED:
        first_key = tl.maximum(first_position + 1 - window, 0)
        window_end = tl.cdiv(tl.maximum(last_position + 1 - window, 0), BLOCK_N) * BLOCK_N

    # Finite, so that a row that sees no key of a block does not compute inf - inf.
    m_i = tl.full([BLOCK_M], -1e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_cache_ptr += head * HEAD_DIM
    v_cache_ptr += head * HEAD_DIM
    if WINDOWED:
        m_i, l_i, acc = _attend(
            q, m_i, l_i, acc, k_cache_ptr, v_cache_ptr, block_table_ptr, q_positions, first_key, last_position + 1,
            first_key // BLOCK_N * BLOCK_N, window_end, scale, softcap, window,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOWED, SOFTCAP, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    m_i, l_i, acc = _attend(
        q, m_i, l_i, acc, k_cache_ptr, v_cache_ptr, block_table_ptr, q_positions, first_key, last_position + 1,
        window_end, causal_start, scale, softcap, window,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOWED, SOFTCAP, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    m_i, l_i, acc = _attend(
        q, m_i, l_i, acc, k_cache_ptr, v_cache_ptr, block_table_ptr, q_positions, first_key, last_position + 1,
        tl.maximum(window_end, causal_start), last_position + 1, scale, softcap, window,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOWED, SOFTCAP, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    if SINKS:
        heads = tl.where(row_mask, head * GROUP_SIZE + offs_m % GROUP_SIZE, KV_HEADS * GROUP_SIZE)
        l_i = add_sinks(l_i, m_i, sinks_ptr, heads, KV_HEADS * GROUP_SIZE)
    result = acc / tl.where(row_mask, l_i, 1.0)[:, None] * value_scale
    tl.store(out_ptr + q_rows * out_stride + offs_head, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q,
    m_i,
    l_i,
    acc,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    q_positions,
    first_key,
    limit,
    start,
    end,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys from `start`, a multiple of BLOCK_N, to `end`; without MASKED every row sees all these keys.

    Positions before `first_key` and from `limit` on are never read: they may be behind the window, where blocks belong
    to other sequences, or beyond the sequence. Their slots may hold NaN, which a weight of 0 does not cancel.
    """
    factor = score_factor(scale, SOFTCAP)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    # Cache blocks are looked up one iteration early, so that loads of keys do not wait for the block table.
    k_positions = start + offs_n
    block_ids = tl.load(block_table_ptr + k_positions // BLOCK_SIZE, mask=k_positions < limit, other=0)
    for start_n in range(start, end, BLOCK_N):
        k_positions = start_n + offs_n
        slots = block_ids.to(tl.int64) * BLOCK_SIZE + k_positions % BLOCK_SIZE
        next_positions = k_positions + BLOCK_N
        block_ids = tl.load(block_table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < limit, other=0)

        at = slots[:, None] * (KV_HEADS * HEAD_DIM) + offs_d[None, :]
        if MASKED or BLOCK_D != HEAD_DIM:
            mask = (k_positions < limit)[:, None] & (offs_d < HEAD_DIM)[None, :]
            if WINDOWED and MASKED:
                mask = mask & (k_positions >= first_key)[:, None]
            k = tl.load(k_cache_ptr + at, mask=mask, other=0.0)
            v = tl.load(v_cache_ptr + at, mask=mask, other=0.0)
        else:
            k = tl.load(k_cache_ptr + at)
            v = tl.load(v_cache_ptr + at)

        qk = tl.dot(q, tl.trans(as_type(k, q.dtype)), input_precision="ieee")
        if SOFTCAP:
            qk = capped(qk * scale, softcap)
        if MASKED:
            distance = q_positions[:, None] - k_positions[None, :]
            visible = distance >= 0
            if WINDOWED:
                visible = visible & (distance < window)
            qk = tl.where(visible, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * factor)
        p = tl.exp2(qk * factor - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), as_type(v, q.dtype), acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return m_i, l_i, acc
