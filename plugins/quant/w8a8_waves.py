"""Chooses the tile of a W8A8 GEMM of many rows by how well its tiles fill the last wave of programs.

Autotuning measures one number of rows per row class, which fills waves better or worse than other numbers of rows. With
persistent tiles the time is that of whole waves, in which each program computes one tile.
"""

from __future__ import annotations

from math import ceil

from engine.ops.gemm.scaled_matmul import W8A8Tile

SQUARE_TILE = W8A8Tile(rows=128, outputs=128, warps=8, stages=6, persistent=True)
LARGE_SUMS = 128 * 256
"""Sums of a large tile, of either orientation."""
SQUARE_WAVE = 0.525
"""Time of a wave of SQUARE_TILE, where that of a wave of large tiles is 1: half the products, by more loads."""
MIN_GAIN = 0.03
"""Share of the time that another tile must save."""


def waves(tile: W8A8Tile, rows: int, outputs: int, sms: int) -> int:
    """Number of waves of a tile's programs."""
    return ceil(tile.programs(rows, outputs) / sms)


def tile_by_waves(chosen: W8A8Tile, rows: int, outputs: int, sms: int) -> W8A8Tile:
    """The tile for these rows, where `chosen` is that of the row class: SQUARE_TILE where its waves take less time."""
    if not chosen.persistent or chosen.rows * chosen.outputs != LARGE_SUMS or chosen.splits > 1:
        return chosen
    large = waves(chosen, rows, outputs, sms)
    square = SQUARE_WAVE * waves(SQUARE_TILE, rows, outputs, sms)
    return SQUARE_TILE if square < (1 - MIN_GAIN) * large else chosen
