"""Which tile of the result, and which inputs, a program of the W8A8 and persistent W4A16 kernels computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SWIZZLE = tl.constexpr(8)
"""Swizzle: consecutive programs compute this many tiles along the rows of x before the next tile of W, so that both
stay in the L2 cache."""


def loaded_shape(x: torch.Tensor, tile_rows: int) -> tuple[list[int], list[int]]:
    """Shape and strides by which tiles of x are loaded: with the rows that its memory has after its own, up to whole
    tiles.

    x: [rows, inputs], contiguous. What such rows contain does not matter, as their results are not stored. Loading them
    is faster than having TMA fill tiles with zeros.
    """
    assert x.is_contiguous(), "x has gaps between its rows; pass x.contiguous()"
    rows, inputs = x.shape
    stored = (x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()) // max(inputs, 1)
    return [max(rows, min(stored, -(-rows // tile_rows) * tile_rows)), inputs], [inputs, 1]


@triton.jit
def place_of_tile(tile, rows, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr = SWIZZLE):
    """The first row of x and the first row of W of the tile with this number. STRIP: as SWIZZLE."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    strip = tile // (STRIP * tiles_n)
    height = tl.minimum(tiles_m - strip * STRIP, STRIP)
    place = tile % (STRIP * tiles_n)
    return (strip * STRIP + place % height) * BLOCK_M, place // height * BLOCK_N


@triton.jit
def share_of_inputs(inputs, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """The first input of this split-K program (program_id(1)), and the end of its inputs."""
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLITS) * BLOCK_K
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, inputs)
