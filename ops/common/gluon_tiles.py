"""Parts of tiles in registers, for Gluon kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(values):
    """Split the columns into a left and a right half."""
    HALF: gl.constexpr = values.shape[1] // 2
    return values.reshape((values.shape[0], 2, HALF)).permute((0, 2, 1)).split()


@gluon.jit
def part_of_columns(tile, NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Part NUMBER of COUNT (1, 2 or 4) equal parts of a tile's columns."""
    if COUNT == 1:
        found = tile
    else:
        left, right = halves(tile)
        half = left if NUMBER < COUNT // 2 else right
        found = part_of_columns(half, NUMBER % (COUNT // 2), COUNT // 2)
    return found
