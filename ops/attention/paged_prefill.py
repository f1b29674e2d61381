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
from attrs import evolve, frozen

from engine.ops.attention import persistent_prefill, persistent_steps
from engine.ops.attention.common import add_sinks, as_type, capped, score_factor
from engine.ops.common.launch import dependent_launch, has_wgmma, release, wait


@frozen(kw_only=True)
class PrefillConfig:
    """Launch parameters of a prefill kernel."""

    block_m: int
    """Rows per tile, a row being one query head of one token; a power of two, at least 16 and the group size."""
    block_n: int
    """Key positions per block; a power of two, at least 16."""
    num_warps: int
    """Warps per program; of the persistent kernel, warps in each of its three groups."""
    num_stages: int
    """Blocks of keys and values in flight or in use."""
    persistent: bool = False
    """Whether the kernel of persistent_prefill runs."""
    across_tiles: bool = False
    """Whether, instead of that, the persistent kernel of persistent_short runs."""

    def tokens(self, group: int) -> int:
        """New tokens per tile, with `group` query heads per KV head."""
        return self.block_m // group


PERSISTENT = PrefillConfig(block_m=128, block_n=128, num_warps=4, num_stages=2, persistent=True)
"""The fastest, or nearly, of those that benchmarks/attention.py --tune tries, on an H200."""
PERSISTENT_NARROW = evolve(PERSISTENT, num_stages=4)
"""For heads of up to NARROW_HEAD_DIM, whose blocks are small enough for four stages."""
NARROW_HEAD_DIM = 64
SHORT_KEYS = 200
"""Maximum mean number of keys per new token for which the kernel of persistent_short is chosen."""
SHORT_KEYS_OF_MANY = 400
"""The same where programs have at least MANY_TILES tiles each: more steps per tile cost time where the longest tile
determines the time."""
MANY_TILES = 2.5


def can_persist(keys: torch.Tensor, dtype: torch.dtype, group: int) -> bool:
    """Whether the persistent kernel supports queries of `dtype` and `group` query heads per KV head over such keys.

    keys: [..., block_size, kv_heads, head_dim].
    """
    block_size, _, head_dim = keys.shape[-3:]
    return (
        has_wgmma(keys.device)
        and keys.dtype == dtype
        and dtype.itemsize == 2
        and head_dim in persistent_prefill.HEAD_DIMS
        and block_size % persistent_steps.RUN == 0
        and group <= PERSISTENT.block_m
    )


@frozen(kw_only=True)
class PrefillWork:
    """The size of a prefill, by which launch parameters are chosen."""

    longest: int
    """Maximum number of new tokens per sequence."""
    keys: float
    """Mean number of keys that a new token sees without a window."""
    tiles: float
    """Tiles of PERSISTENT.block_m rows per multiprocessor, over all KV heads."""

    @classmethod
    def of(
        cls,
        query_lens: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        *,
        group: int,
        kv_heads: int,
        programs: int,
    ) -> PrefillWork:
        """The work of sequences, of which each has new tokens. programs: number of multiprocessors."""
        queries = query_lens.astype(np.int64)
        tiles = int((-(-queries * group // PERSISTENT.block_m)).sum()) * kv_heads
        return cls(
            longest=int(queries.max()),
            keys=float((queries * (2 * context_lens - queries + 1)).sum() / (2 * queries.sum())),
            tiles=tiles / programs,
        )


def persistent_config(head_dim: int, work: PrefillWork) -> PrefillConfig:
    """Launch parameters of the persistent kernels."""
    config = PERSISTENT_NARROW if head_dim <= NARROW_HEAD_DIM else PERSISTENT
    if work.keys > (SHORT_KEYS_OF_MANY if work.tiles >= MANY_TILES else SHORT_KEYS):
        return config
    return evolve(config, block_n=config.block_n // 2, num_stages=2 * config.num_stages, across_tiles=True)


def prefill_config(
    work: PrefillWork,
    group: int,
    head_dim: int,
    itemsize: int,
    shared_memory: int,
    *,
    persistent: bool = False,
) -> PrefillConfig:
    """Choose the launch parameters.

    group: query heads per KV head; itemsize: bytes per number; shared_memory: bytes per multiprocessor; persistent: the
    result of `can_persist`.

    128 rows with 8 warps are two warp groups of Hopper's matrix instruction. Few new tokens, and float32, which runs
    without tensor cores, take smaller tiles. The first candidate whose queries, keys and values fit into shared memory
    is chosen. The persistent kernels serve all but few new tokens.
    """
    wanted = [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)]
    if itemsize == 4:
        wanted = [(32, 32, 4, 2)]
    elif work.longest * group <= 64:
        wanted = wanted[2:]
    elif persistent:
        return persistent_config(head_dim, work)
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    min_m = max(16, triton.next_power_of_2(group))
    configs = [PrefillConfig(block_m=max(m, min_m), block_n=n, num_warps=w, num_stages=s) for m, n, w, s in wanted]
    smallest = PrefillConfig(block_m=min_m, block_n=16, num_warps=4, num_stages=2)
    room = shared_memory - 2048

    def fits(config: PrefillConfig) -> bool:
        return bool((config.block_m + 2 * config.num_stages * config.block_n) * row_bytes <= room)

    return next(filter(fits, configs), smallest)


def prefill_tiles(
    query_lens: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    sequences: npt.NDArray[np.int64],
    tokens: int,
) -> npt.NDArray[np.int32]:
    """List the tiles of `sequences`, `tokens` new tokens at most per tile.

    query_lens, context_lens: of all sequences of the batch; sequences: indices into them.
    Returns [tiles, 4]: sequence, position of the tile's first token, its row of q, number of tokens. Tiles that see the
    most keys come first, so that the programs that run last are short.
    """
    counts = -(-query_lens[sequences] // tokens)
    owners = np.repeat(sequences, counts)
    # 0 to count - 1 within each sequence
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = numbers * tokens
    sizes = np.minimum(query_lens[owners] - begins, tokens)
    positions = context_lens[owners] - query_lens[owners] + begins
    rows = (np.cumsum(query_lens) - query_lens)[owners] + begins
    order = np.argsort(-(positions + sizes), kind="stable")
    return np.stack([owners, positions, rows, sizes], axis=1)[order].astype(np.int32)


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
    config: PrefillConfig,
) -> None:
    """Compute causal attention for the rows of q that the tiles cover, into the same rows of out.

    q, out: [tokens, heads, head_dim], last two dimensions dense;
    keys, values: [blocks, block_size, kv_heads, head_dim];
    tables: [sequences, max_blocks] int32; tiles: [tiles, 4] int32, from `prefill_tiles` with config.tokens(group);
    value_scale: factor on the values;
    sinks: [heads] float32, the score of one more key of each head, whose value is zero.
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
