"""Norm of latents, rotary embedding of queries and keys, and the write to a latent cache, in one kernel (MLA)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

MAX_HEADS = 8
"""Maximum number of one token's query heads per program."""


def rotate_and_write_latents(
    q: torch.Tensor,
    rotated: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Write rotated queries to q, normalize and rotate keys in place, and cache the keys.

    q: [tokens, heads, latent + 2 * pairs], dense; its second part is written. rotated: [tokens, heads, 2 * pairs], the
    queries before rotation, last dimension dense. k: [tokens, latent + 2 * pairs], dense; weight: [latent], of the norm
    of its first part. cache: [blocks, block_size, 1, latent + 2 * pairs], dense; slots: [tokens] int64, block *
    block_size + offset. cos, sin: [tokens, pairs] float32, dense. Dimension 2 i rotates with dimension 2 i + 1. All
    arithmetic is float32, and each number is rounded once.
    """
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    latent = len(weight)
    block_heads = min(MAX_HEADS, triton.next_power_of_2(heads))
    _rotate_and_write_latents_kernel[(tokens, 1 + triton.cdiv(heads, block_heads))](
        q,
        rotated,
        k,
        weight,
        cache,
        slots,
        cos,
        sin,
        eps,
        rotated.stride(0),
        rotated.stride(1),
        HEADS=heads,
        LATENT=latent,
        HALF=cos.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_L=triton.next_power_of_2(latent),
        BLOCK_HALF=triton.next_power_of_2(cos.shape[1]),
        num_warps=2,
        **dependent_launch(q.device),
    )


@triton.jit
def _rotate_and_write_latents_kernel(
    q,
    rotated,
    k,
    weight,
    cache,
    slots,
    cos,
    sin,
    eps,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, 1 + blocks of query heads): the key first, then the queries."""
    release(PDL)
    SIZE: tl.constexpr = LATENT + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    in_pair = pair < HALF
    wait(PDL)
    c = tl.load(cos + token * HALF + pair, mask=in_pair, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=in_pair, other=0.0)
    if tl.program_id(1) == 0:
        offs = tl.arange(0, BLOCK_L)
        in_latent = offs < LATENT
        row = k + token * SIZE
        cached = cache + tl.load(slots + token) * SIZE
        latent = tl.load(row + offs, mask=in_latent, other=0.0).to(tl.float32)
        k1 = tl.load(row + LATENT + 2 * pair, mask=in_pair, other=0.0).to(tl.float32)
        k2 = tl.load(row + LATENT + 2 * pair + 1, mask=in_pair, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        latent *= tl.load(weight + offs, mask=in_latent, other=0.0).to(tl.float32)
        _store_key(row, latent, k1 * c - k2 * s, k2 * c + k1 * s, offs, pair, LATENT, HALF)
        _store_key(cached, latent, k1 * c - k2 * s, k2 * c + k1 * s, offs, pair, LATENT, HALF)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (head < HEADS)[:, None] & in_pair[None, :]
        source = rotated + token * token_stride + head[:, None] * head_stride + 2 * pair[None, :]
        q1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        q2 = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
        target = q + (token * HEADS + head[:, None]) * SIZE + LATENT + 2 * pair[None, :]
        tl.store(target, (q1 * c - q2 * s).to(q.dtype.element_ty), mask=mask)
        tl.store(target + 1, (q2 * c + q1 * s).to(q.dtype.element_ty), mask=mask)


@triton.jit
def _store_key(row, latent, first, second, offs, pair, LATENT: tl.constexpr, HALF: tl.constexpr):
    """Store a key: its latent, and the pairs of its rotated part."""
    tl.store(row + offs, latent.to(row.dtype.element_ty), mask=offs < LATENT)
    tl.store(row + LATENT + 2 * pair, first.to(row.dtype.element_ty), mask=pair < HALF)
    tl.store(row + LATENT + 2 * pair + 1, second.to(row.dtype.element_ty), mask=pair < HALF)
