"""Norm of query and key heads, rotary embedding and the write to the KV cache, in one pass over the packed projections.

A row of `qkv` is [query heads | key heads | value heads] of head_dim each. The keys and the values of a layer's cache
are [slots, kv_heads, head_dim] each, dense.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, dependent_launch_of_rows, release, wait

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
MAX_HEADS, WARPS = 8, 2
"""Maximum number of one token's heads per program, and its warps."""
MANY_TOKENS = 512
"""With more tokens than that, programs have more heads, of up to NUMBERS_MANY_TOKENS numbers, and WARPS_MANY_TOKENS
warps, where that at least halves the number of programs: launching them then takes longer than loads and stores."""
NUMBERS_MANY_TOKENS, WARPS_MANY_TOKENS = 2048, 4
MAX_HEADS_FLOAT8 = 16
"""Maximum number of heads for a float8 cache: its divisions take longer than what fewer programs save."""
ANGLES_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["tokens"])
def _angles_kernel(
    cos,
    sin,
    positions,
    frequencies,
    tokens,
    factor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pair = tl.arange(0, BLOCK_HALF)
    frequency = tl.load(frequencies + pair, mask=pair < HALF, other=0.0)
    wait(PDL)
    release(PDL)  # not before `wait`, see ops.common.launch
    position = tl.load(positions + token, mask=token < tokens, other=0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    # Whole turns are subtracted in float64: implementations differ in the sine of a large float32.
    wide = angle.to(tl.float64)
    turns = (wide * 0.15915494309189535 + 0.5).to(tl.int32)
    angle = (wide - turns.to(tl.float64) * 6.283185307179586).to(tl.float32)
    place = token.to(tl.int64)[:, None] * HALF + pair[None, :]
    mask = (token < tokens)[:, None] & (pair < HALF)[None, :]
    tl.store(cos + place, tl.cos(angle) * factor, mask=mask)
    tl.store(sin + place, tl.sin(angle) * factor, mask=mask)


def angles(positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute factor * cos and factor * sin of position * frequency: [tokens, pairs] float32 each.

    positions: [tokens] int64, none negative; frequencies: [pairs] float32, radians per token.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = torch.empty((2, tokens, half), dtype=torch.float32, device=positions.device)
    block = triton.next_power_of_2(half)
    block_tokens = max(1, ANGLES_PER_PROGRAM // block)
    if tokens:
        _angles_kernel[(-(-tokens // block_tokens),)](
            cos,
            sin,
            positions,
            frequencies,
            tokens,
            factor,
            HALF=half,
            BLOCK_HALF=block,
            BLOCK_TOKENS=block_tokens,
            num_warps=4,
            **dependent_launch(positions.device),
        )
    return cos, sin


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    keys,
    values,
    slots,
    cos,
    sin,
    weight,
    eps,
    key_scale,
    value_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, groups of BLOCK_HEADS heads); with MANY (tokens * groups,), the groups of a token one after the
    other, which read memory in order."""
    release(PDL)
    if MANY:
        groups: tl.constexpr = (HEADS + 2 * KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
        token = (tl.program_id(0) // groups).to(tl.int64)
        group = tl.program_id(0) % groups
    else:
        token = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1)
    head = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    # Queries and keys are rotated, values only written.
    rotated = (head < HEADS + KV_HEADS)[:, None]
    is_key = (head >= HEADS)[:, None] & rotated
    is_value = (head >= HEADS + KV_HEADS)[:, None] & (head < HEADS + 2 * KV_HEADS)[:, None]

    # A head has three parts: two halves that rotate against each other, and the dimensions that do not rotate. With
    # INTERLEAVED the halves are the even and the odd dimensions.
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    first_dim = pair * 2 if INTERLEAVED else pair
    second_dim = first_dim + (1 if INTERLEAVED else HALF)
    rest = tl.arange(0, BLOCK_REST)[None, :]
    start = head[:, None] * DIM
    in_pair = (pair < HALF) & (head < HEADS + 2 * KV_HEADS)[:, None]
    in_rest = (rest < DIM - 2 * HALF) & (head < HEADS + 2 * KV_HEADS)[:, None]
    if HAS_NORM:  # weights have the layout of the query and key heads
        first_weight = tl.load(weight + start + first_dim, mask=in_pair & rotated, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + start + second_dim, mask=in_pair & rotated, other=0.0).to(tl.float32)
    wait(PDL)

    row = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + start
    slot = tl.load(slots + token)
    if ROTATED:
        angle = token * HALF + pair
        c = tl.load(cos + angle, mask=pair < HALF, other=0.0)
        s = tl.load(sin + angle, mask=pair < HALF, other=0.0)
    first_as_is = tl.load(row + first_dim, mask=in_pair, other=0.0)
    second_as_is = tl.load(row + second_dim, mask=in_pair, other=0.0)
    first = first_as_is.to(tl.float32)
    second = second_as_is.to(tl.float32)
    if DIM > 2 * HALF:
        rest_as_is = tl.load(row + 2 * HALF + rest, mask=in_rest, other=0.0)
        third = rest_as_is.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if DIM > 2 * HALF:
            squares += tl.sum(third * third, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = first * scale * first_weight
        second = second * scale * second_weight
        if DIM > 2 * HALF:
            rest_weight = tl.load(weight + start + 2 * HALF + rest, mask=in_rest & rotated, other=0.0).to(tl.float32)
            third = third * scale * rest_weight
    if ROTATED:
        turned_first = first * c - second * s
        second = second * c + first * s
        first = turned_first
    new_first = tl.where(rotated, first, first_as_is.to(tl.float32))
    new_second = tl.where(rotated, second, second_as_is.to(tl.float32))

    tl.store(row + first_dim, new_first.to(qkv.dtype.element_ty), mask=in_pair & rotated)
    tl.store(row + second_dim, new_second.to(qkv.dtype.element_ty), mask=in_pair & rotated)
    scale_of = tl.where(is_value, value_scale, key_scale)
    new_first = quantize(new_first, scale_of, FLOAT8_MAX).to(keys.dtype.element_ty)
    new_second = quantize(new_second, scale_of, FLOAT8_MAX).to(keys.dtype.element_ty)
    key_row = keys + slot * (KV_HEADS * DIM) + (start - HEADS * DIM)
    value_row = values + slot * (KV_HEADS * DIM) + (start - (HEADS + KV_HEADS) * DIM)
    tl.store(key_row + first_dim, new_first, mask=in_pair & is_key)
    tl.store(key_row + second_dim, new_second, mask=in_pair & is_key)
    tl.store(value_row + first_dim, new_first, mask=in_pair & is_value)
    tl.store(value_row + second_dim, new_second, mask=in_pair & is_value)
    if DIM > 2 * HALF:
        third = tl.where(rotated, third, rest_as_is.to(tl.float32))
        if HAS_NORM:
            tl.store(row + 2 * HALF + rest, third.to(qkv.dtype.element_ty), mask=in_rest & rotated)
        third = quantize(third, scale_of, FLOAT8_MAX).to(keys.dtype.element_ty)
        tl.store(key_row + 2 * HALF + rest, third, mask=in_rest & is_key)
        tl.store(value_row + 2 * HALF + rest, third, mask=in_rest & is_value)


@triton.jit
def quantize(x, scale, FLOAT8_MAX: tl.constexpr):
    """x / scale, clamped to FLOAT8_MAX in magnitude, NaN if x is; x itself where FLOAT8_MAX is 0. scale: [heads, 1]."""
    if FLOAT8_MAX > 0.0:
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        x = tl.clamp(x, -FLOAT8_MAX, FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x


def rotate_and_write(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    num_heads: int,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate queries and keys in place in `qkv`, after their norm if `weight` is given; cache keys and values.

    qkv: [tokens, (num_heads + 2 * kv_heads) * head_dim], dense; keys, values: [blocks, block_size, kv_heads, head_dim];
    slots: [tokens] int64, block * block_size + offset; cos, sin: [tokens, rotary_dim / 2] float32, dense, or None for
    no rotation; weight: [num_heads + kv_heads, head_dim], of any dtype. Dimension i rotates with dimension
    i + rotary_dim / 2; interleaved: dimension 2 i with dimension 2 i + 1. The cache may have another type; a float8
    cache stores keys / key_scale and values / value_scale. All arithmetic is float32, and each number is rounded once.
    """
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    kv_heads, dim = keys.shape[-2:]
    half = dim // 2 if cos is None else cos.shape[1]
    is_float8 = keys.dtype == torch.float8_e4m3fn
    heads, block_half, block_rest, many = _tile(num_heads + 2 * kv_heads, dim, half, is_float8, tokens > MANY_TOKENS)
    groups = -(-(num_heads + 2 * kv_heads) // heads)
    _rotate_and_write_kernel[(tokens * groups,) if many else (tokens, groups)](
        qkv,
        keys,
        values,
        slots,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        qkv if weight is None else weight,
        eps,
        key_scale,
        value_scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_HEADS=heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        ROTATED=cos is not None,
        INTERLEAVED=interleaved,
        HAS_NORM=weight is not None,
        FLOAT8_MAX=FLOAT8_MAX if is_float8 else 0.0,
        MANY=many,
        num_warps=WARPS_MANY_TOKENS if many else WARPS,
        **dependent_launch_of_rows(qkv.device, tokens),
    )


@cache
def _tile(heads: int, dim: int, half: int, is_float8: bool, many_tokens: bool) -> tuple[int, int, int, bool]:
    """Heads, pairs and unrotated dimensions per program, powers of two; and whether the heads are those for many
    tokens."""
    block_heads = min(MAX_HEADS, triton.next_power_of_2(heads))
    more_heads = max(1, min(NUMBERS_MANY_TOKENS // triton.next_power_of_2(dim), triton.next_power_of_2(heads)))
    if is_float8:
        more_heads = min(more_heads, MAX_HEADS_FLOAT8)
    many = many_tokens and 2 * -(-heads // more_heads) <= -(-heads // block_heads)
    block_half, block_rest = triton.next_power_of_2(half), triton.next_power_of_2(max(dim - 2 * half, 1))
    return more_heads if many else block_heads, block_half, block_rest, many
