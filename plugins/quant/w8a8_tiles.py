"""Tiles of W8A8 GEMMs: defaults, the candidates of each row class, and rules by the number of tiles."""

from __future__ import annotations

from attrs import evolve

from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.ops.gemm.transposed_launch import TransposedTile

Tile = W8A8Tile | TransposedTile | None
"""How a number of rows is multiplied. None: by torch's kernel."""
ROW_CLASSES = (64, 128, 256, 512, 4096)
"""Row classes: a number of rows uses the choice of the smallest class that is not less, or of the last."""
PERSISTENT_CLASS = 192
"""A further row class where persistent tiles can be used and there is no `one_wave_tile`."""
SMALL_TILE_ROWS = 64
"""Up to this many rows, tiles have as many rows."""
SMALL_TILES = (
    W8A8Tile(rows=SMALL_TILE_ROWS, outputs=32, warps=4, stages=6),
    W8A8Tile(rows=SMALL_TILE_ROWS, outputs=64, warps=4, stages=5),
)
MEDIUM_TILES = (
    W8A8Tile(rows=128, outputs=64, warps=4, stages=6),
    W8A8Tile(rows=128, outputs=128, warps=8, stages=4),
)
LARGE_TILE = W8A8Tile(rows=128, outputs=256, warps=8, stages=4)
"""Default tiles: the fastest, or nearly, of those that benchmarks/quant_kernels.py --tune tries, on an H200."""
SHAPES = {
    64: (
        (64, 32, 4, 6), (64, 32, 4, 8), (64, 64, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6),
        (128, 32, 4, 5), (128, 64, 4, 6),
    ),
    128: (
        (64, 64, 4, 6), (64, 128, 4, 6), (128, 32, 4, 5), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4),
        (128, 128, 8, 6), (128, 256, 8, 4),
    ),
    256: (
        (64, 256, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4), (128, 128, 8, 6), (128, 256, 8, 3), (128, 256, 8, 4),
        (256, 128, 8, 3), (256, 128, 8, 4),
    ),
    512: ((128, 128, 8, 4), (128, 256, 8, 4), (256, 128, 8, 3)),
    4096: ((128, 256, 8, 4), (256, 128, 8, 3)),
}  # fmt: skip
"""(rows of x, outputs, warps, stages) of the candidates, by row class."""
BLOCK_SCALED_SHAPES = {
    64: ((64, 32, 4, 6), (64, 64, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4)),
    128: ((64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4)),
    256: ((64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 8, 4), (128, 128, 8, 6)),
    512: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4)),
    4096: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4)),
}
"""The same of candidates with scales of blocks: a thread keeps its sums twice, before and after scaling."""
PERSISTENT_SHAPES = {
    64: ((64, 32, 4, 8, 256), (64, 64, 4, 6, 256), (64, 128, 4, 8, 128)),
    128: (
        (64, 32, 4, 8, 256), (64, 64, 4, 6, 256), (64, 128, 4, 8, 128), (128, 64, 4, 8, 128), (128, 128, 8, 6, 128),
    ),
    192: ((64, 64, 4, 6, 256), (64, 128, 4, 8, 128), (128, 128, 8, 6, 128)),
    256: (
        (64, 64, 4, 6, 256), (64, 128, 4, 8, 128), (128, 64, 4, 8, 128), (128, 128, 8, 6, 128), (128, 256, 8, 4, 128),
    ),
    512: ((128, 128, 8, 6, 128), (128, 256, 8, 4, 128), (256, 128, 8, 3, 128)),
    4096: ((128, 256, 8, 4, 128), (256, 128, 8, 3, 128)),
}  # fmt: skip
"""The same of persistent candidates, for GPUs with wgmma, and their inputs per loop iteration."""
TRANSPOSED_TILES = {
    192: (TransposedTile(weight_rows=128, rest=64, stages=5), TransposedTile(weight_rows=64, rest=64, stages=6)),
    256: (TransposedTile(weight_rows=128, rest=128, stages=4),),
}
"""Further candidates where persistent tiles can be used, by row class."""
TRANSPOSED_ROWS = range(129, 257)
"""Numbers of rows in these row classes."""
ONE_WAVE_ROWS = range(129, PERSISTENT_CLASS + 1)
"""Numbers of rows that three tiles of 64 rows have."""
ONE_WAVE_TILES = (
    W8A8Tile(rows=64, outputs=128, warps=4, stages=8, persistent=True),
    W8A8Tile(rows=64, outputs=64, warps=4, stages=6, block_k=256, persistent=True),
)
"""Tiles for ONE_WAVE_ROWS where all programs run concurrently, but not those of 256 rows: for all twelve weights
measured they took 1 to 18 % less time than the choice for 256 rows. At 150 rows they take 10 % less than at 192, where
a row class would be measured."""
MAX_ROWS_ALL_PERSISTENT = 256
"""Row class up to which SHAPES are left out where persistent tiles can be used: of 37 weights that were tuned on an
H200, none was multiplied faster by one of them at 256 rows, and up to 128 they took at least 15 % longer."""
SPLITS = (2, 4)
MIN_BLOCKS_PER_SPLIT = 4
"""Minimum loop iterations per program of a split tile."""
MAX_SUMS_PER_THREAD = 64
"""Maximum sums per thread of a split tile: a thread keeps its own sums in registers and reads others."""


def matmul_tile(rows: int, outputs: int, sms: int) -> W8A8Tile:
    """The default tile for a product of this size: small where large tiles would leave multiprocessors idle."""
    if rows <= SMALL_TILE_ROWS:
        return next((tile for tile in SMALL_TILES if tile.programs(rows, outputs) <= 2 * sms), SMALL_TILES[-1])
    return next((tile for tile in MEDIUM_TILES if tile.programs(rows, outputs) <= sms), LARGE_TILE)


def one_wave_tile(outputs: int, sms: int) -> W8A8Tile | None:
    """The one of ONE_WAVE_TILES of which three rows of tiles, but not four, are at most one per multiprocessor."""
    fitting = (
        tile
        for tile in ONE_WAVE_TILES
        if tile.programs(ONE_WAVE_ROWS[-1], outputs) <= sms < tile.programs(ONE_WAVE_ROWS[-1] + 1, outputs)
    )
    return next(fitting, None)


def split_tiles(tile: W8A8Tile, rows: int, outputs: int, inputs: int, sms: int) -> list[W8A8Tile]:
    """The same tile with splits that occupy more than half of the multiprocessors, without exceeding them."""
    found = []
    for splits in SPLITS:
        split = evolve(tile, splits=splits)
        programs = tile.programs(rows, outputs) * splits
        wanted = programs <= sms * tile.resident and (programs * 2 > sms or splits == SPLITS[-1])
        enough = -(-inputs // tile.block_k) >= splits * MIN_BLOCKS_PER_SPLIT
        small = tile.rows <= rows and tile.rows * tile.outputs <= MAX_SUMS_PER_THREAD * tile.warps * 32
        if wanted and enough and small and split.fits(rows, outputs):
            found.append(split)
    return found
