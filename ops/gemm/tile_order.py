"""Which part of a product a program of the kernels that multiply codes by codes takes."""

from __future__ import annotations

import triton
import triton.language as tl

SWIZZLE = tl.constexpr(8)
"""Programs next to each other take so many tiles of rows of x before the next tile of W, so that both stay in the L2
cache."""


@triton.jit
def place_of_tile(tile, rows, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tile with this number begins: row of x, row of W."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    strip = tile // (SWIZZLE * tiles_n)
    height = tl.minimum(tiles_m - strip * SWIZZLE, SWIZZLE)
    place = tile % (SWIZZLE * tiles_n)
    return (strip * SWIZZLE + place % height) * BLOCK_M, place // height * BLOCK_N


@triton.jit
def share_of_inputs(inputs, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Where the inputs of this program begin and end, of those that share a tile by their second number."""
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLITS) * BLOCK_K
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, inputs)
