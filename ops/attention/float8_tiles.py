"""Gathers blocks of a float8 KV cache into tiles of 128 keys whose values are transposed, for float8 prefill.

Hopper's float8 matrix instruction reads both operands along the dimension that it sums over: values as
[head_dim, keys], while the cache holds [keys, kv_heads, head_dim]. Transposed once per layer, they are not transposed
by every tile of queries that reads them. In a tile, one copy instruction (TMA) loads the keys or values of a KV head.

The values of 16 keys are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. In this order, the registers that hold the
scores of 16 keys after the first matrix product hold the weights as the second reads them, so nothing moves between
threads (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32": accumulators, and matrix A of 8 bits).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

TILE = 128
"""Keys per tile; block_size divides this number."""


def gather_tiles(
    keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, spans: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy blocks of the cache into tiles, without their scales.

    keys, values: [cache blocks, block_size, kv_heads, head_dim] float8_e4m3fn, dense, head_dim a power of two;
    blocks: [n * TILE / block_size] int32, the blocks of n tiles in order, any number for a block without keys;
    spans: [n, 3] int32, per tile: position of the tile's first key, position of the sequence's first new token, length
    of the sequence's context; window: maximum distance that is visible, plus one; None: all keys are.
    Returns keys: [at least n, kv_heads, TILE, head_dim] and values: [at least n, kv_heads, head_dim, TILE], for as many
    tiles as the next power of two says, so that the allocator sees few sizes. What no new token of the sequence sees is
    zero in tiles below n (the cache may hold NaN there) and undefined in the others.
    """
    block_size, kv_heads, head_dim = keys.shape[1:]
    count = len(spans)
    capacity = triton.next_power_of_2(max(count, 1))
    key_tiles = torch.empty((capacity, kv_heads, TILE, head_dim), dtype=keys.dtype, device=keys.device)
    value_tiles = torch.empty((capacity, kv_heads, head_dim, TILE), dtype=keys.dtype, device=keys.device)
    if count:
        _gather_kernel[(count * kv_heads,)](
            *(keys.view(torch.uint8), values.view(torch.uint8)),
            *(key_tiles.view(torch.uint8), value_tiles.view(torch.uint8)),
            *(blocks, spans, window or 0),
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            SIZE=TILE,
            WINDOWED=window is not None,
            num_warps=4,
            **dependent_launch(keys.device),
        )
    return key_tiles, value_tiles


@triton.jit
def _load(cache, blocks, tile, head, keys, begin, first, end, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SIZE):  # fmt: skip
    """Load keys or values of a tile, at the indices `keys`: [SIZE, HEAD_DIM]; zeros before position `first` and from
    `end` on."""
    inside = (begin + keys >= first) & (begin + keys < end)
    block = tl.load(blocks + (tile * SIZE + keys) // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    rows = ((block * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + head) * HEAD_DIM
    return tl.load(cache + rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=inside[:, None], other=0)


@triton.jit(do_not_specialize=["window"])
def _gather_kernel(
    keys, values, key_tiles, value_tiles, blocks, spans, window, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * KV_HEADS). Elements are passed as bytes, which are only moved."""
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    begin = tl.load(spans + tile * 3)
    end = tl.load(spans + tile * 3 + 2)
    first = 0
    if WINDOWED:
        first = tl.load(spans + tile * 3 + 1) + 1 - window
    wait(PDL)
    release(PDL)
    place = tl.program_id(0).to(tl.int64) * (SIZE * HEAD_DIM)
    columns = tl.arange(0, HEAD_DIM)
    number = tl.arange(0, SIZE)
    key = _load(keys, blocks, tile, head, number, begin, first, end, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SIZE)
    tl.store(key_tiles + place + number[:, None] * HEAD_DIM + columns[None, :], key)
    order = number // 16 * 16 + number // 2 % 2 * 8 + number // 4 % 4 * 2 + number % 2
    value = _load(values, blocks, tile, head, order, begin, first, end, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SIZE)
    tl.store(value_tiles + place + columns[:, None] * SIZE + number[None, :], tl.trans(value))
