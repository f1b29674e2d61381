"""Copies blocks of a float8 KV cache to 16-bit tensors, for prefill kernels that read 16-bit keys and values.

A prefill kernel reads the keys and values of a sequence once per tile of new tokens. Converted once beforehand, they
are converted once, not per tile; and each float8 number is exact in float16 and in bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.attention.common import as_type
from engine.ops.common.launch import dependent_launch, release, wait

CHUNK = 4096
"""Numbers that a program converts at a time."""


def widen_blocks(
    keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the blocks numbered `blocks` to `dtype`, without their scales: entry i of each result is blocks[i].

    keys, values: [cache blocks, block_size, kv_heads, head_dim] float8_e4m3fn, dense; blocks: [n] int32.
    Returns keys and values: [at least n, block_size, kv_heads, head_dim] each, for as many blocks as the next power of
    two says, so that the allocator sees few sizes. Blocks from n on are undefined.
    """
    count = len(blocks)
    shape = (triton.next_power_of_2(max(count, 1)), *keys.shape[1:])
    wide_keys, wide_values = (torch.empty(shape, dtype=dtype, device=keys.device) for _ in range(2))
    if count:
        numbers = keys[0].numel()
        _widen_kernel[(count, 2)](
            keys,
            values,
            wide_keys,
            wide_values,
            blocks,
            NUMBERS=numbers,
            CHUNK=min(CHUNK, triton.next_power_of_2(numbers)),
            num_warps=4,
            **dependent_launch(keys.device),
        )
    return wide_keys, wide_values


@triton.jit
def _widen_kernel(
    keys, values, wide_keys, wide_values, blocks, NUMBERS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Grid: (blocks to convert, 2): keys, then values. NUMBERS: of a block's keys, or values."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + place).to(tl.int64)
    source = keys
    target = wide_keys
    if tl.program_id(1) == 1:
        source = values
        target = wide_values
    wait(PDL)
    release(PDL)
    for begin in range(0, NUMBERS, CHUNK):
        offs = begin + tl.arange(0, CHUNK)
        inside = offs < NUMBERS
        narrow = tl.load(source + block * NUMBERS + offs, mask=inside)
        tl.store(target + place * NUMBERS + offs, as_type(narrow, target.dtype.element_ty), mask=inside)
