"""Tiles of the persistent W4A16 kernels, how programs share them, and predicted times.

The kernels compute W x^T: rows of a tile are rows of W, columns of a tile are rows of x.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

from engine.ops.gemm.packed_layout import SPANS
from engine.ops.gemm.skinny_launch import MAX_POLLED_SUMS

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_tiles import WeightOnlyShape


@frozen
class TileTime:
    """Microseconds of a GEMM by tiles of one size, of the program that takes longest.

    start + unit * units of a program + tile * tiles of a program, and of tiles that programs share share + part *
    programs of such a tile. A unit is a block of inputs of a tile.
    """

    start: float
    unit: float
    tile: float
    share: float
    part: float


TIMES = {
    (128, 64): TileTime(2.02, 1.01, 1.10, 2.66, 0.22),
    (128, 128): TileTime(1.41, 1.39, 1.79, 3.89, 0.39),
    (128, 160): TileTime(1.10, 1.96, 2.22, 4.14, 0.48),
    (128, 192): TileTime(0.98, 2.15, 2.26, 4.60, 0.61),
    (128, 256): TileTime(1.16, 2.68, 2.32, 5.24, 0.90),
    (256, 64): TileTime(1.26, 1.67, 1.85, 3.96, 0.31),
    (256, 128): TileTime(1.93, 2.74, 1.18, 5.62, 0.86),
}
"""(rows, columns) of a tile -> times: least squares of the relative error over 12 weights in groups of 128 and 22
numbers of rows from 72 to 1408, on an H200 (docs/optimizations-linear-batches.md): 4 to 7 % on average. The choice
depends on their ratios only."""
MIN_WHOLE = 0.8
"""Without times: with tiles for this part of all multiprocessors, a specialized tile is not shared."""


def _time(size: tuple[int, int], tiles: int, blocks: int, programs: int) -> float:
    """Microseconds of this many tiles by programs that share those that fill no wave."""
    times = TIMES[size]
    whole, rest = divmod(tiles, programs)
    found = times.start + times.unit * tiles * blocks / programs + times.tile * (whole + (rest > 0))
    return found + (times.share + times.part * programs / rest if rest else 0.0)


@cache
def _programs(size: tuple[int, int], tiles: int, blocks: int, most: int) -> int:
    """Number of programs, at most `most`: those that share tiles evenly, or that compute equally many tiles each."""
    shared = most
    if tiles < most:
        units_per_program = -(-tiles * blocks // most)
        shared = -(-tiles * blocks // units_per_program)
    if size not in TIMES:
        return shared
    even = max(number for number in range(1, most + 1) if tiles % number == 0)
    return min(shared, even, key=lambda number: _time(size, tiles, blocks, number))


@frozen(kw_only=True)
class PersistentTile:
    """A tile of the persistent kernels, `matmul_kernel` of specialized_w4a16.py and of persistent_w4a16.py, for GPUs
    with wgmma."""

    rows: Literal[128, 256] = 128
    """Rows of W."""
    columns: Literal[32, 64, 128, 160, 192, 256]
    """Rows of x. More than 128 with 128 rows of W only."""
    splits: int = 1
    """Programs that divide the inputs of one tile: a power of two. 1: programs share tiles by Stream-K."""
    warps: ClassVar[int] = 8
    max_sums: ClassVar[int] = 128 * 256
    """Results of the largest tile."""

    def __str__(self) -> str:
        splits = f", {self.splits} splits" if self.splits > 1 else ""
        return f"{self.rows}x{self.columns}, persistent{splits}"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def steps(self) -> int:
        """Stages of x per block of the layout."""
        return 4 if self.rows * self.columns == self.max_sums or self.rest else 2

    @property
    def rest(self) -> int:
        """Rows of x beyond the first 128, which have sums of their own where their number is no power of two."""
        return self.columns - 128 if self.columns in (160, 192) else 0

    @property
    def stages(self) -> int:
        """Stages of x in shared memory, of up to 32 KB each."""
        stages = {(128, 32): 8, (128, 64): 6, (128, 160): 6, (128, 192): 5, (256, 32): 6, (256, 128): 5}
        return stages.get(self.size, 4)

    @property
    def is_specialized(self) -> bool:
        """Whether the kernel with specialized warps computes it."""
        return self.columns < 256

    @property
    def slots(self) -> int:
        """Blocks of words in shared memory, of 16 or 32 KB each, with specialized warps."""
        return {(128, 32): 6, (128, 64): 5, (128, 128): 4, (256, 32): 4, (256, 128): 2}.get(self.size, 3)

    @property
    def pending(self) -> int:
        """Products in flight while other weights are unpacked: as many as there are registers for their weights."""
        return 2 if self.columns <= 64 else 1

    def tiles(self, weight_rows: int, rows: int) -> int:
        """Tiles of the result."""
        return -(-weight_rows // self.rows) * -(-rows // self.columns)

    def programs(self, weight_rows: int, blocks: int, rows: int, most: int) -> int:
        """Number of programs. Without splits, at most `most`."""
        tiles = self.tiles(weight_rows, rows)
        if self.splits > 1:
            return tiles * self.splits
        if self.size not in TIMES and MIN_WHOLE * most <= tiles < most:
            return tiles
        return _programs(self.size, tiles, blocks, most)

    def predicted_time(self, weight_rows: int, blocks: int, rows: int, most: int) -> float:
        """Microseconds by as many programs as `programs` says, about, of a tile without splits that is in TIMES."""
        tiles = self.tiles(weight_rows, rows)
        return _time(self.size, tiles, blocks, _programs(self.size, tiles, blocks, most))

    def can_split(self, weight_rows: int, blocks: int, rows: int, most: int) -> bool:
        """Whether all programs run concurrently, each has inputs and a share of results, and their sums fit. Not for
        the largest tiles, where this is slower."""
        programs = self.tiles(weight_rows, rows) * self.splits
        share = self.rows // self.splits
        has_share = share >= 16 and share * self.columns >= 128 * self.warps
        is_small = not self.rest and self.rows * self.columns < self.max_sums
        fits = is_small and programs * self.rows * self.columns <= MAX_POLLED_SUMS
        return programs <= most and self.splits <= blocks and has_share and fits

    @classmethod
    def supports(cls, shape: WeightOnlyShape) -> bool:
        """Whether the kernel has the layout, and rows of x and of the result start at multiples of 16 bytes."""
        has_layout = shape.layout.scale_layout == "groups" and shape.layout.bits == 4 and shape.layout.span == SPANS[0]
        return has_layout and shape.inputs % 8 == 0 and shape.outputs % 8 == 0


MIN_PREDICTED_ROWS = 129
"""From this many rows of x on, times are predicted: up to 128, a row class is served by one number of tiles."""
MANY_WAVES = 6
"""More waves of the largest tile than this are many."""
MIN_GAIN = 0.07
"""Share of the time that another tile must save."""
MIN_GAIN_MANY_WAVES = 0.04
"""The same with many waves: times of 128x256 and 256x128 are predicted more accurately there, relative to each other
(h200-large-w4a16.json)."""
SIZES = tuple(PersistentTile(rows=rows, columns=columns) for rows, columns in TIMES)  # type: ignore[arg-type]
LARGEST = PersistentTile(rows=128, columns=256)


def tile_for_rows(
    chosen: PersistentTile,
    weight_rows: int,
    blocks: int,
    rows: int,
    sms: int,
    *,
    row_class: int = 0,
    measured: Collection[object] = (),
) -> PersistentTile:
    """The tile for a number of rows of x, where `chosen` is that of the row class.

    Autotuning measures one number of rows per row class, which fills tiles and waves better or worse than others: a
    tile that is predicted to be faster replaces the choice. measured: the candidates of the row class, which `chosen`
    beat with as many tiles.
    """
    if chosen.splits > 1 or chosen.size not in TIMES or rows < MIN_PREDICTED_ROWS:
        return chosen
    times = {
        tile: tile.predicted_time(weight_rows, blocks, rows, sms)
        for tile in SIZES
        if tile not in measured or tile.tiles(weight_rows, rows) != tile.tiles(weight_rows, row_class)
    }
    best = min(times, key=lambda tile: times[tile], default=chosen)
    has_many_waves = LARGEST.tiles(weight_rows, rows) > MANY_WAVES * sms
    min_gain = MIN_GAIN_MANY_WAVES if has_many_waves else MIN_GAIN
    limit = (1 - min_gain) * chosen.predicted_time(weight_rows, blocks, rows, sms)
    return best if best != chosen and times[best] < limit else chosen
