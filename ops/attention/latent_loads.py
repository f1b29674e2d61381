"""Loads of queries and keys that decode and prefill over a latent cache share (MLA, arXiv:2405.04434).

A cached key is [latent | rotated]: LATENT numbers, which are the value too, and ROTATED numbers. All query heads share
the keys. A row is one query head of one token, so a tile of rows reads each key once, and values not at all: both
products of an iteration read the latents from shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


def padded_key(latent: int, rotated: int) -> tuple[int, int]:
    """The two parts of a key as the kernels hold them: powers of two, and at least what a matrix product takes."""
    return max(16, triton.next_power_of_2(latent)), max(16, triton.next_power_of_2(rotated))


@triton.jit
def load_queries(
    q_ptr,
    offs_row,
    row_mask,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Load rows of queries at the offsets `offs_row`: the part for latents, [BLOCK_M, BLOCK_L], and the rotated part,
    [BLOCK_M, BLOCK_R]; zeros where not `row_mask`."""
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    rows = q_ptr + offs_row[:, None]
    latent_mask = row_mask[:, None] & (offs_l < LATENT)[None, :]
    rotated_mask = row_mask[:, None] & (offs_r < ROTATED)[None, :]
    q_latent = tl.load(rows + offs_l[None, :], mask=latent_mask, other=0.0)
    q_rotated = tl.load(rows + LATENT + offs_r[None, :], mask=rotated_mask, other=0.0)
    return q_latent, q_rotated


@triton.jit
def load_block_ids(block_table_ptr, k_positions, limit, BLOCK_SIZE: tl.constexpr):
    """Look up the cache block of each position; 0 from position `limit` on."""
    return tl.load(block_table_ptr + k_positions // BLOCK_SIZE, mask=k_positions < limit, other=0)


@triton.jit
def load_keys(
    cache_ptr,
    block_ids,
    k_positions,
    limit,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Load the keys at some positions: the latents, [BLOCK_N, BLOCK_L], and the rotated parts, [BLOCK_N, BLOCK_R].

    Zeros from position `limit` on: the cache may hold NaN there, which a weight of 0 does not cancel.
    """
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    slots = block_ids.to(tl.int64) * BLOCK_SIZE + k_positions % BLOCK_SIZE
    keys = cache_ptr + slots[:, None] * (LATENT + ROTATED)
    key_mask = k_positions[:, None] < limit
    k_latent = tl.load(keys + offs_l[None, :], mask=key_mask & (offs_l < LATENT)[None, :], other=0.0)
    k_rotated = tl.load(keys + LATENT + offs_r[None, :], mask=key_mask & (offs_r < ROTATED)[None, :], other=0.0)
    return k_latent, k_rotated
