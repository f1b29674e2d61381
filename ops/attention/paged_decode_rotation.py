"""Norm of heads, rotary embedding and the write to the KV cache within decode attention, one new token per sequence.

A program of the decode kernel reads the raw query heads of its KV head, and the new key, from the packed projections,
and norms and rotates them. The program with a sequence's last position also writes the new key and value to the cache.
No loop reads that position: its score and value start the softmax.

The loop's first loads of older keys and values therefore need not wait for the preceding kernel. `begin_sequence` waits
in the loop's first iteration, behind these loads. Waiting and rotating ahead of the loop costs more than it saves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.attention.common import as_type, capped
from engine.ops.attention.paged_decode_config import MIN_M, DecodeConfig
from engine.ops.attention.rope_and_cache import quantize
from engine.ops.common.launch import release, wait


@frozen(kw_only=True)
class NewTokens:
    """What decode attention does with the projections of the new tokens: the arguments of `rotate_and_write`."""

    slots: torch.Tensor
    """[sequences] int64: of the new keys and values."""
    cos: torch.Tensor | None
    """[sequences, head_dim / 2] float32, dense; None: no rotation."""
    sin: torch.Tensor | None
    weight: torch.Tensor | None = None
    """[num_heads + kv_heads, head_dim]: of the norm of the heads of queries and keys; None: no norm."""
    eps: float = 0.0
    key_scale: float = 1.0
    interleaved: bool = False


def rotates_within_decode(
    config: DecodeConfig, heads: tuple[int, int], head_dim: int, rotary_dim: int | None, kv_dtype: torch.dtype
) -> bool:
    """Whether decode attention norms, rotates and caches new tokens itself: it can, and is faster.

    heads: numbers of query and KV heads; rotary_dim: None: heads are not rotated.
    """
    group = heads[0] // heads[1] * config.fold
    return (
        config.rotates
        and kv_dtype.itemsize > 1
        and group + config.fold <= max(MIN_M, triton.next_power_of_2(group))
        and triton.next_power_of_2(head_dim) == head_dim
        and rotary_dim in (None, head_dim)
    )


@triton.jit
def load_heads(
    row_ptr,
    heads,
    is_head,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load heads of a token's projections, norm and rotate them: [heads, HEAD_DIM] float32, as rotate_and_write does.

    row_ptr: the token's projections; heads: [heads], indices in the row; is_head: [heads], which of these there are;
    cos_ptr, sin_ptr: of the token, or None; weight_ptr: or None.
    """
    if cos_ptr is None:
        dims = tl.arange(0, HEAD_DIM)[None, :]
        at = heads[:, None] * HEAD_DIM + dims
        x = tl.load(row_ptr + at, mask=is_head[:, None], other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + at, mask=is_head[:, None], other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None] * weight
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        pairs = tl.arange(0, HALF)
        c = tl.load(cos_ptr + pairs)[None, :]
        s = tl.load(sin_ptr + pairs)[None, :]
        mask = is_head[:, None] & (pairs >= 0)[None, :]
        first_at = heads[:, None] * HEAD_DIM + (pairs * 2 if INTERLEAVED else pairs)[None, :]
        second_at = first_at + (1 if INTERLEAVED else HALF)
        first = tl.load(row_ptr + first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(row_ptr + second_at, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            first_weight = tl.load(weight_ptr + first_at, mask=mask, other=0.0).to(tl.float32)
            second_weight = tl.load(weight_ptr + second_at, mask=mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
            first = first * scale * first_weight
            second = second * scale * second_weight
        x = tl.join(first * c - second * s, second * c + first * s)
        if not INTERLEAVED:
            x = tl.permute(x, (0, 2, 1))
        x = tl.reshape(x, (heads.shape[0], HEAD_DIM))
    return x


@triton.jit
def begin_sequence(
    row_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    eps,
    key_scale,
    value_scale,
    head,
    is_last,
    scale,
    softcap,
    factor,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the projections of a token, and compute what a loop over the older positions starts with.

    Returns the queries, and acc, m_i and l_i after the new position if `is_last`, else of no position. Then also writes
    the new key and value to the cache. head and KV_HEADS count folded KV heads.
    """
    # Rows are the query heads, then the key heads: one norm, one rotation, and a product of all with all.
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    is_query = rows < GROUP_SIZE
    is_key = (rows >= GROUP_SIZE) & (rows < GROUP_SIZE + FOLD)
    key_head = head * FOLD + rows - GROUP_SIZE
    heads = tl.where(is_query, head * GROUP_SIZE + rows, KV_HEADS * GROUP_SIZE + key_head)
    wait(PDL)
    release(PDL)
    slot = tl.load(slot_ptr)
    written = (is_key & is_last)[:, None] & (dims >= 0)
    v = tl.load(row_ptr + (heads + KV_HEADS * FOLD)[:, None] * HEAD_DIM + dims, mask=written, other=0.0)
    x = load_heads(row_ptr, heads, is_query | is_key, cos_ptr, sin_ptr, weight_ptr, eps, HEAD_DIM, INTERLEAVED)
    k = quantize(x, tl.full((1, 1), key_scale, tl.float32), FLOAT8_MAX).to(k_cache_ptr.dtype.element_ty)
    v = quantize(v.to(tl.float32), tl.full((1, 1), value_scale, tl.float32), FLOAT8_MAX)
    v = v.to(v_cache_ptr.dtype.element_ty)
    at = slot * (KV_HEADS * FOLD * HEAD_DIM) + key_head[:, None] * HEAD_DIM + dims
    tl.store(k_cache_ptr + at, k, mask=written)
    tl.store(v_cache_ptr + at, v, mask=written)

    q = x.to(row_ptr.dtype.element_ty)
    v = as_type(v, q.dtype)
    if k.dtype != q.dtype:
        q = tl.where(is_key[:, None], as_type(k, q.dtype), q)
    # Which of the folded heads a row belongs to.
    own = tl.where(is_query, rows // (GROUP_SIZE // FOLD), rows - GROUP_SIZE)
    if FOLD != 1:
        q = _fold(q, own, FOLD)
        v = _fold(v, own, FOLD)
    sees = (rows[None, :] == GROUP_SIZE + own[:, None]) & is_last
    qk = tl.dot(q, tl.trans(q), input_precision="ieee")
    if SOFTCAP:
        qk = capped(qk * scale, softcap)
    m_i = tl.max(tl.where(sees, qk, float("-inf")), 1) * factor
    acc = tl.dot(tl.where(sees, 1.0, 0.0).to(q.dtype), v, input_precision="ieee")
    return q, acc, m_i, tl.full([BLOCK_M], 1.0, tl.float32) * is_last


@triton.jit
def _fold(x, own, FOLD: tl.constexpr):
    """Widen [rows, head_dim] to [rows, FOLD * head_dim]: zeros in the dimensions of other KV heads than a row's own."""
    here = own[:, None] == tl.arange(0, FOLD)[None, :]
    return tl.reshape(tl.where(here[:, :, None], x[:, None, :], 0.0), (x.shape[0], FOLD * x.shape[1]))
