"""Decode attention over a float8 cache with 16-bit queries: the loop over a sequence's tiles.

Products are computed in float16, to which a GPU converts two float8 numbers per instruction. Queries and softmax
weights are scaled by powers of two to stay within float16's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.attention.common import capped, score_factor
from engine.ops.common.fast_math import PTX

Q_EXPONENT = tl.constexpr(14)
"""Queries converted to float16 are scaled so that the largest element of each is between 2^14 and 2^15."""
P_EXPONENT = tl.constexpr(15)
"""Softmax weights converted to float16 are scaled to at most 2^15; weights down to 2^-29 remain normal numbers."""


@triton.jit
def attend_float8(
    q,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    head,
    first_tile,
    end_tile,
    context_len,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to one sequence's tiles [first_tile, end_tile); return acc, m_i and l_i.

    The softmax weights in acc and l_i are scaled by 2^P_EXPONENT: m_i is the maximum exponent less P_EXPONENT.
    """
    # Both products are transposed (K q^T, V^T p^T), which pads query heads to 8 instead of 16. The second product needs
    # pairs of positions in a register, and ldmatrix transposes only 16-bit units. Values are therefore loaded as 16-bit
    # words of two dimensions each, and even and odd dimensions are multiplied separately.
    offs_d = tl.arange(0, BLOCK_D)
    offs_pair = tl.arange(0, BLOCK_D // 2)
    offs_n = tl.arange(0, BLOCK_N)
    v_words_ptr = v_cache_ptr.to(tl.pointer_type(tl.int16))
    q, q_scale = _scaled_to_float16(q)
    q = tl.trans(q)
    if SOFTCAP:
        factor = tl.full([BLOCK_M], 1.0, tl.float32) * score_factor(scale, SOFTCAP)
    else:
        factor = q_scale * score_factor(scale, SOFTCAP)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # One sum per position of a tile: threads add them up after the loop instead of in each iteration.
    l_i = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_even = tl.zeros([BLOCK_D // 2, BLOCK_M], tl.float32)
    acc_odd = tl.zeros([BLOCK_D // 2, BLOCK_M], tl.float32)

    # Cache blocks are looked up one iteration early, so that loads of keys do not wait for the block table.
    block_ids = _block_ids(block_table_ptr, first_tile, offs_n, context_len, BLOCK_N, BLOCK_SIZE)
    for tile in range(first_tile, end_tile):
        k_positions = tile * BLOCK_N + offs_n
        slots, block_starts = k_positions % BLOCK_SIZE, block_ids.to(tl.int64) * BLOCK_SIZE
        # If slots do not depend on the tile, all offsets from `block_starts` are loop-invariant.
        if BLOCK_SIZE % BLOCK_N == 0:
            slots, block_starts = offs_n, block_starts + tile * BLOCK_N % BLOCK_SIZE
        elif BLOCK_N % BLOCK_SIZE == 0:
            slots = offs_n % BLOCK_SIZE
        block_starts = block_starts * (KV_HEADS * HEAD_DIM)
        block_ids = _block_ids(block_table_ptr, tile + 1, offs_n, context_len, BLOCK_N, BLOCK_SIZE)

        # Other slots may hold NaN, which a weight of 0 does not cancel.
        k_mask = k_positions[:, None] < context_len
        v_mask = k_positions[None, :] < context_len
        if WINDOWED:
            k_mask = k_mask & (k_positions[:, None] >= context_len - window)
            v_mask = v_mask & (k_positions[None, :] >= context_len - window)
        if BLOCK_D != HEAD_DIM:
            k_mask = k_mask & (offs_d[None, :] < HEAD_DIM)
            v_mask = v_mask & (offs_pair[:, None] < HEAD_DIM // 2)
        k_offs = block_starts[:, None] + (slots[:, None] * (KV_HEADS * HEAD_DIM) + (head * HEAD_DIM + offs_d[None, :]))
        v_offs = (block_starts // 2)[None, :] + (
            slots[None, :] * (KV_HEADS * HEAD_DIM // 2) + (head * (HEAD_DIM // 2) + offs_pair[:, None])
        )
        k = tl.load(k_cache_ptr + k_offs, mask=k_mask, other=0.0).to(tl.float16)
        v_words = tl.load(v_words_ptr + v_offs, mask=v_mask, other=0)
        v_even, v_odd = _float16_pairs(v_words)

        qk = tl.dot(k, q)
        if SOFTCAP:
            qk = capped(qk * (q_scale * scale)[None, :], softcap)
        visible = k_positions < context_len
        if WINDOWED:
            visible = visible & (k_positions >= context_len - window)
        qk = tl.where(visible[:, None], qk, float("-inf"))

        # Every tile has a visible position, so m_new is finite.
        m_new = tl.maximum(m_i, tl.max(qk, 0) * factor - P_EXPONENT)
        p = tl.exp2(qk * factor[None, :] - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha[None, :] + p
        p = p.to(tl.float16)
        acc_even = tl.dot(v_even, p, acc_even * alpha[None, :])
        acc_odd = tl.dot(v_odd, p, acc_odd * alpha[None, :])
        m_i = m_new
    return tl.interleave(tl.trans(acc_even), tl.trans(acc_odd)), m_i, tl.sum(l_i, 0)


@triton.jit
def _block_ids(block_table_ptr, tile, offs_n, context_len, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Look up the cache block of each position of a tile; 0 from position `context_len` on.

    Blocks that do not cross tiles are looked up once each, up to 8 per tile.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        first = tile * BLOCK_N
        block_ids = offs_n * 0 + tl.load(block_table_ptr + first // BLOCK_SIZE, mask=first < context_len, other=0)
    elif BLOCK_N % BLOCK_SIZE == 0 and BLOCK_N // BLOCK_SIZE <= 8:
        first = tile * (BLOCK_N // BLOCK_SIZE)
        block_ids = offs_n * 0
        for i in tl.static_range(BLOCK_N // BLOCK_SIZE):
            block_id = tl.load(block_table_ptr + first + i, mask=(first + i) * BLOCK_SIZE < context_len, other=0)
            block_ids = tl.where(offs_n // BLOCK_SIZE == i, block_id, block_ids)
    else:
        k_positions = tile * BLOCK_N + offs_n
        block_ids = tl.load(block_table_ptr + k_positions // BLOCK_SIZE, mask=k_positions < context_len, other=0)
    return block_ids


@triton.jit
def _scaled_to_float16(q):
    """Convert queries to float16, each scaled by a power of two; return them and the inverse powers.

    Exact for elements down to 2^-28 of the largest, which are normal numbers in float16.
    """
    q = q.to(tl.float32)
    # Biased exponent of the largest element; at least that of 2^-40, so that no scale underflows.
    exponent = tl.maximum(tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23, 127 - 40)
    power = ((2 * 127 - exponent + Q_EXPONENT) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - Q_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return (q * power[:, None]).to(tl.float16), inverse


@triton.jit
def _float16_pairs(words):
    """Convert the two float8 (e4m3) numbers of each 16-bit word to float16; return those of the low and high bytes."""
    if PTX:
        # Two words per call: their low bytes make one pair, their high bytes the other.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high
