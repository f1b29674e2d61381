"""Chooses the tile of a W8A8 GEMM of more than 256 rows by the waves of its programs.

Autotuning measures one number of rows per row class, which fills waves better or worse than other numbers of rows. With
persistent tiles the time is that of whole waves, in which each program computes one tile.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from attrs import frozen

from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.plugins.quant.w8a8_tiles import Tile

BLOCK = 128
"""Inputs that `WaveTime.block` is the time of."""


@frozen
class WaveTime:
    """Microseconds of a GEMM by one tile: start + waves * (blocks * block + end) - idle waves * blocks * saved.

    blocks: of inputs. Idle waves: the share of the last wave that has no programs, without which the others have more
    of the memory's and of the power's budget.
    """

    start: float
    block: float
    saved: float
    end: float


def _tile(rows: int, outputs: int, warps: int, stages: int, block_k: int = BLOCK) -> W8A8Tile:
    return W8A8Tile(rows=rows, outputs=outputs, warps=warps, stages=stages, block_k=block_k, persistent=True)


SQUARE_TILE = _tile(128, 128, 8, 6)
LARGE_TILE = _tile(128, 256, 8, 4)
TIMES = {
    _tile(64, 64, 4, 6, 256): WaveTime(2.15, 0.161, 0.073, 0.37),
    _tile(64, 128, 4, 8): WaveTime(2.80, 0.258, 0.120, 0.40),
    _tile(64, 256, 4, 5): WaveTime(2.61, 0.499, 0.236, 0.41),
    _tile(128, 64, 4, 8): WaveTime(3.10, 0.232, 0.057, 0.46),
    SQUARE_TILE: WaveTime(3.55, 0.383, 0.113, 0.67),
    LARGE_TILE: WaveTime(3.68, 0.682, 0.124, 1.65),
    _tile(256, 128, 8, 3): WaveTime(2.48, 0.721, 0.136, 1.95),
}
"""Least squares of the relative error over 28 weights and 18 numbers of rows from 288 to 3072, fp8 and int8, on an H200
(docs/optimizations-linear-batches.md): 3 to 7 % on average. The choice depends on their ratios only."""
SIZES = {(tile.rows, tile.outputs): tile for tile in TIMES}
LIBRARY_TILES = (SQUARE_TILE, LARGE_TILE)
"""Torch's float8 kernel has the waves of these tiles, mostly of the faster one."""
LIBRARY_TIME, LIBRARY_START = 0.95, 1.5
"""Time of torch's kernel, where that of the faster of LIBRARY_TILES is 1, and microseconds that it takes besides."""
MIN_GAIN = 0.02
"""Share of the time that another tile must save."""
MAX_PREDICTED_WAVES = 3
"""Up to this many waves of LARGE_TILE times are predicted. With more, the GPU's power limit counts as well, and only
the waves of large and of square tiles are compared."""
LARGE_SUMS = 128 * 256
"""Sums of a large tile, of either orientation."""
SQUARE_WAVE = 0.525
"""Time of a wave of SQUARE_TILE with many waves, where that of a wave of large tiles is 1."""
MIN_GAIN_OF_SQUARE = 0.03
"""As MIN_GAIN, with many waves."""


def waves(tile: W8A8Tile, rows: int, outputs: int, sms: int) -> int:
    """Number of waves of a tile's programs."""
    return ceil(tile.programs(rows, outputs) / sms)


def predicted_time(tile: W8A8Tile, rows: int, outputs: int, inputs: int, sms: int) -> float:
    """Microseconds of a GEMM by one of TIMES, about."""
    times, number = TIMES[tile], waves(tile, rows, outputs, sms)
    blocks = ceil(inputs / BLOCK)
    idle = number - tile.programs(rows, outputs) / sms
    return times.start + number * (blocks * times.block + times.end) - idle * blocks * times.saved


def tile_by_waves(
    chosen: W8A8Tile | None,
    rows: int,
    row_class: int,
    outputs: int,
    inputs: int,
    sms: int,
    measured: Collection[Tile] = (),
) -> W8A8Tile | None:
    """The tile for these rows, where `chosen` is that of the row class: another where that is predicted to be faster.

    None: torch's kernel. measured: the candidates of the row class, which `chosen` beat with as many programs.
    """
    if waves(LARGE_TILE, rows, outputs, sms) > MAX_PREDICTED_WAVES:
        return _large_or_square(chosen, rows, outputs, sms)
    times = {
        tile: predicted_time(tile, rows, outputs, inputs, sms)
        for tile in TIMES
        if tile not in measured or tile.programs(rows, outputs) != tile.programs(row_class, outputs)
    }
    if chosen is None:
        fastest = min(predicted_time(tile, rows, outputs, inputs, sms) for tile in LIBRARY_TILES)
        expected = LIBRARY_TIME * fastest + LIBRARY_START
    elif chosen.splits == 1 and (chosen.rows, chosen.outputs) in SIZES:
        alike = SIZES[chosen.rows, chosen.outputs]
        expected = predicted_time(alike, rows, outputs, inputs, sms)
    else:
        return chosen
    best = min(times, key=lambda tile: times[tile], default=None)
    return best if best is not None and times[best] < (1 - MIN_GAIN) * expected else chosen


def _large_or_square(chosen: W8A8Tile | None, rows: int, outputs: int, sms: int) -> W8A8Tile | None:
    """As `tile_by_waves`, for many waves: SQUARE_TILE where its waves take less time than those of a large tile."""
    if chosen is None or not chosen.persistent or chosen.rows * chosen.outputs != LARGE_SUMS or chosen.splits > 1:
        return chosen
    large = waves(chosen, rows, outputs, sms)
    square = SQUARE_WAVE * waves(SQUARE_TILE, rows, outputs, sms)
    return SQUARE_TILE if square < (1 - MIN_GAIN_OF_SQUARE) * large else chosen
