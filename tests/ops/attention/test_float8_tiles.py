"""Gathering of float8 blocks into tiles, and transposition of values."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.ops.attention.float8_tiles import TILE, gather_tiles

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
ORDER = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
"""Of 16 keys in the values' tiles."""


def cache(block_size: int, kv_heads: int, dim: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values; the last block holds NaN only."""
    torch.manual_seed(0)
    found = torch.randn(2, blocks + 1, block_size, kv_heads, dim)
    found[:, blocks] = torch.nan
    keys, values = found.to(torch.float8_e4m3fn).to(DEVICE)
    return keys, values


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8).cpu()


@pytest.mark.parametrize(("block_size", "kv_heads", "dim"), [(16, 3, 64), (8, 2, 128), (128, 1, 16), (32, 8, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_tiles_hold_the_keys_and_transposed_values_that_new_tokens_see(
    window: int | None, block_size: int, kv_heads: int, dim: int
) -> None:
    # Two sequences: 230 tokens of which 100 are new, and 128 new tokens.
    contexts, per = (230, 128), TILE // block_size
    count = sum(-(-context // block_size) for context in contexts)
    keys, values = cache(block_size, kv_heads, dim, count)
    order = torch.randperm(count).tolist()
    blocks = torch.full((3 * per,), count, dtype=torch.int32)  # no sequence's blocks, NaN
    used = -(-230 // block_size)
    blocks[:used] = torch.tensor(order[:used])
    blocks[2 * per :] = torch.tensor(order[used:])
    spans = torch.tensor([(0, 130, 230), (TILE, 130, 230), (0, 0, 128)], dtype=torch.int32)
    key_tiles, value_tiles = gather_tiles(keys, values, blocks.to(DEVICE), spans.to(DEVICE), window)
    assert key_tiles.shape == (4, kv_heads, TILE, dim)
    assert value_tiles.shape == (4, kv_heads, dim, TILE)
    for tiles, stored in ((key_tiles, keys), (value_tiles, values)):
        expected = bits(stored)[blocks.long()].reshape(3, TILE, kv_heads, dim)
        for tile, (begin, first, end) in enumerate(spans.tolist()):
            positions = begin + torch.arange(TILE)
            seen = positions < end
            if window is not None:
                seen &= positions > first - window
            expected[tile][~seen] = 0
        if tiles is value_tiles:
            places = (torch.arange(TILE).reshape(-1, 16)[:, ORDER]).flatten()
            expected = expected[:, places].permute(0, 2, 3, 1)
        else:
            expected = expected.permute(0, 2, 1, 3)
        assert torch.equal(bits(tiles)[:3], expected)


def test_no_tiles_launch_nothing() -> None:
    keys, values = cache(16, 1, 16, 1)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    found, _ = gather_tiles(keys, values, none, none.view(0, 3), None)
    assert found.shape == (1, 1, TILE, 16)
