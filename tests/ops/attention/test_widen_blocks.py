"""Conversion of float8 KV blocks to 16 bits."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.ops.attention.widen_blocks import CHUNK, widen_blocks

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_exact(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if DEVICE == "cpu":  # the interpreter reads NaN as 480
        codes[codes % 128 == 127] = 0
    keys = codes.view(torch.float8_e4m3fn).view(1, 16, 1, 16).to(DEVICE)
    values = codes.flip(0).view(torch.float8_e4m3fn).view(1, 16, 1, 16).to(DEVICE)
    blocks = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for found, stored in zip(widen_blocks(keys, values, blocks, dtype), (keys, values), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found[:1].float(), stored.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("block_size", "kv_heads", "dim"), [(16, 3, 64), (8, 8, 128), (32, 1, 16)])
def test_blocks_are_copied_in_the_order_asked_for(block_size: int, kv_heads: int, dim: int) -> None:
    shape = (9, block_size, kv_heads, dim)
    keys, values = (torch.randn(shape).to(torch.float8_e4m3fn).to(DEVICE) for _ in range(2))
    blocks = torch.tensor([7, 0, 3, 3, 8], dtype=torch.int32, device=DEVICE)
    wide = widen_blocks(keys, values, blocks, torch.bfloat16)
    for found, stored in zip(wide, (keys, values), strict=True):
        assert found.shape == (8, *shape[1:])
        assert torch.equal(found[:5], stored.to(torch.bfloat16)[blocks.long()])


def test_blocks_of_more_than_a_chunk_are_converted_whole() -> None:
    keys = torch.randn(2, 16, 5, 128).to(torch.float8_e4m3fn).to(DEVICE)
    assert keys[0].numel() > CHUNK
    found, _ = widen_blocks(keys, keys, torch.tensor([1], dtype=torch.int32, device=DEVICE), torch.float16)
    assert torch.equal(found[0], keys[1].half())


def test_no_blocks_launch_nothing() -> None:
    keys = torch.zeros(1, 16, 1, 16, dtype=torch.float8_e4m3fn, device=DEVICE)
    found, _ = widen_blocks(keys, keys, torch.zeros(0, dtype=torch.int32, device=DEVICE), torch.float16)
    assert found.shape == (1, 16, 1, 16)
