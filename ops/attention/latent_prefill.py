"""Prefill attention over a latent cache, which holds the new tokens' keys already.

A tile is a run of one sequence's new tokens with all query heads, as in paged_prefill: these are the rows, so that each
key is read once per tile. The maps from latents to the heads' keys and values stay applied to queries and results, so a
product of a query and a key takes `latent + rotated` multiplications, several times as many as with the heads' own
keys. In return, prefill reads the cache as it is, whatever the length of the context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.attention.latent_loads import load_block_ids, load_keys, load_queries, padded_key
from engine.ops.attention.paged_prefill_config import PrefillConfig
from engine.ops.common.launch import dependent_launch, release, wait

MAX_ROWS = 64
"""Maximum rows per tile: their acc takes half of the registers of 8 warps."""


def latent_prefill_config(key_bytes: int, itemsize: int, shared_memory: int, *, wgmma: bool) -> PrefillConfig:
    """Choose the launch parameters: the first candidate whose queries and keys fit into shared memory.

    key_bytes: bytes of a cached key, its parts padded to powers of two; itemsize: bytes per number; shared_memory:
    bytes per multiprocessor; wgmma: whether the GPU has it; then tiles have 64 keys, with which 16 sequences of 2048
    tokens take 4.8 ms on an H200, and 5.7 ms with 32 keys.
    """
    wanted = [(64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2), (16, 16, 4, 2)]
    if itemsize == 4:  # without tensor cores
        wanted = [(16, 16, 4, 2)]
    elif wgmma:
        wanted = [(64, 64, 8, 2), *wanted]
    configs = [PrefillConfig(block_m=m, block_n=n, num_warps=w, num_stages=s) for m, n, w, s in wanted]

    def fits(config: PrefillConfig) -> bool:
        keys = config.num_stages * config.block_n
        return bool((config.block_m + keys) * key_bytes + 6144 <= shared_memory)

    return next(filter(fits, configs), configs[-1])


def heads_per_tile(num_heads: int, config: PrefillConfig) -> int:
    """Query heads of a token in one tile; the `group` of config.tokens."""
    return min(num_heads, config.block_m)


def latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    config: PrefillConfig,
) -> None:
    """Compute causal attention for the rows of q that the tiles cover, into the same rows of out.

    q: [tokens, heads, latent + rotated], last two dimensions dense;
    cache: [blocks, block_size, 1, latent + rotated], dense;
    tables: [sequences, max_blocks] int32;
    tiles: [tiles, 4] int32, from `prefill_tiles` with config.tokens(heads_per_tile(heads, config));
    out: [tokens, heads, latent], last two dimensions dense.
    """
    num_heads, latent = out.shape[1:]
    group = heads_per_tile(num_heads, config)
    block_l, block_r = padded_key(latent, q.shape[2] - latent)
    _prefill_kernel[(len(tiles) * triton.cdiv(num_heads, group),)](
        q,
        cache,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        scale,
        HEADS=num_heads,
        GROUP_SIZE=group,
        LATENT=latent,
        ROTATED=q.shape[2] - latent,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(q.device),
    )


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    tiles_ptr,
    out_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + GROUP_SIZE - 1) // GROUP_SIZE
    tile = tiles_ptr + tl.program_id(0) // HEAD_BLOCKS * 4
    wait(PDL)
    release(PDL)
    block_table_ptr = block_tables_ptr + tl.load(tile).to(tl.int64) * table_stride
    first_position = tl.load(tile + 1)
    tokens = tl.load(tile + 3)
    # Positions up to the tile's last token. All rows see the keys of the tiles before `causal_tile`.
    limit = first_position + tokens
    causal_tile = (first_position + 1) // BLOCK_N

    offs_m = tl.arange(0, BLOCK_M)
    offs_l = tl.arange(0, BLOCK_L)
    heads = tl.program_id(0) % HEAD_BLOCKS * GROUP_SIZE + offs_m % GROUP_SIZE
    row_mask = (offs_m < tokens * GROUP_SIZE) & (heads < HEADS)
    rows = (tl.load(tile + 2) + offs_m // GROUP_SIZE).to(tl.int64)
    q_latent, q_rotated = load_queries(
        q_ptr, rows * q_stride + heads * (LATENT + ROTATED), row_mask, LATENT, ROTATED, BLOCK_L, BLOCK_R
    )
    q_positions = first_position + offs_m // GROUP_SIZE

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    m_i, l_i, acc = _attend(
        q_latent, q_rotated, m_i, l_i, acc, cache_ptr, block_table_ptr, q_positions, limit, 0, causal_tile,
        scale, LATENT, ROTATED, BLOCK_SIZE, BLOCK_N, BLOCK_L, BLOCK_R, False,
    )  # fmt: skip
    m_i, l_i, acc = _attend(
        q_latent, q_rotated, m_i, l_i, acc, cache_ptr, block_table_ptr, q_positions, limit, causal_tile,
        tl.cdiv(limit, BLOCK_N), scale, LATENT, ROTATED, BLOCK_SIZE, BLOCK_N, BLOCK_L, BLOCK_R, True,
    )  # fmt: skip
    result = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    offs_result = rows * out_stride + heads * LATENT
    result_mask = row_mask[:, None] & (offs_l < LATENT)[None, :]
    tl.store(out_ptr + offs_result[:, None] + offs_l[None, :], result, mask=result_mask)


@triton.jit
def _attend(
    q_latent,
    q_rotated,
    m_i,
    l_i,
    acc,
    cache_ptr,
    block_table_ptr,
    q_positions,
    limit,
    first_tile,
    end_tile,
    scale,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the tiles [first_tile, end_tile) of BLOCK_N positions; without MASKED every row sees all their keys."""
    factor = scale * 1.4426950408889634
    # Cache blocks are looked up one iteration early, so that loads of keys do not wait for the block table.
    k_positions = first_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    block_ids = load_block_ids(block_table_ptr, k_positions, limit, BLOCK_SIZE)
    for tile in range(first_tile, end_tile):
        k_positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_latent, k_rotated = load_keys(
            cache_ptr, block_ids, k_positions, limit, LATENT, ROTATED, BLOCK_SIZE, BLOCK_L, BLOCK_R
        )
        block_ids = load_block_ids(block_table_ptr, k_positions + BLOCK_N, limit, BLOCK_SIZE)

        qk = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        qk = tl.dot(q_rotated, tl.trans(k_rotated), qk, input_precision="ieee")
        if MASKED:
            qk = tl.where(k_positions[None, :] <= q_positions[:, None], qk, float("-inf"))
        # Every row sees the first key, so m_new is finite.
        m_new = tl.maximum(m_i, tl.max(qk, 1) * factor)
        p = tl.exp2(qk * factor - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(k_latent.dtype), k_latent, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return m_i, l_i, acc
