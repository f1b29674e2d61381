"""Tiles of the kernels for few rows of x, w4a16_few_rows.py and w8a16_few_rows.py, and the rules that choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from engine.ops.gemm.packed_layout import SPANS

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_tiles import WeightOnlyShape

MAX_FEW_ROWS = 8
"""Maximum rows of x for which these tiles are the default. Autotuning tries some with more, for small 4-bit weights."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""
TILE_ROWS = 16
"""Rows of W of the smallest tile."""
LONG_INPUTS = 24
"""4 bits: with more blocks of 256 inputs than this, eight warps divide them."""
MEDIUM_INPUTS = 20
"""4 bits: up to this many blocks of 256 inputs, four warps divide those of few tiles."""
SHORT_INPUTS = 8
"""4 bits: up to this many blocks of 256 inputs, four warps with two blocks each ahead have one loop iteration."""
MAX_FEW_TILES = 0.65
"""4 bits: tiles of TILE_ROWS per multiprocessor that are few, at most."""


@frozen(kw_only=True)
class FewRowsTile:
    """A tile of the kernels for few rows of x, for GPUs with wgmma: it was not measured on others."""

    rows: int
    """Rows of W: a multiple of 16."""
    warps: int
    """Warps, which divide the inputs, unless `row_warps`."""
    ahead: int
    """Blocks of each warp that are loaded before the first is multiplied."""
    x_ahead: int
    """Fields of x that are loaded ahead of those being multiplied: 1, 2 or 4, or 0 for a block at a time, when
    needed. Of 8-bit weights at most those of `ahead` blocks."""
    programs: int
    """Programs per multiprocessor, for which there are registers."""
    row_warps: int = 1
    """Warps that divide the rows of W, and read the same x; the others divide the inputs."""
    splits: int = 1
    """Split-K: programs that divide the inputs of one tile. Of 8-bit weights only."""
    columns: int = MAX_FEW_ROWS
    """Rows of x. 8-bit weights have one tile of at most 8."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of W, {self.warps} warps, {self.ahead} blocks and {self.x_ahead} fields of x ahead,"
            f" {self.programs} programs, {self.row_warps} row warps"
            f"{f', {self.splits} splits' if self.splits > 1 else ''}"
            f"{f', {self.columns} rows of x' if self.columns > MAX_FEW_ROWS else ''}"
        )

    @property
    def registers(self) -> int:
        """Maximum registers per thread."""
        return min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MAX_REGISTERS)

    def grid(self, weight_rows: int, rows: int) -> tuple[int, int, int]:
        """Launch grid for these numbers of rows of W and of x."""
        return -(-weight_rows // self.rows), self.splits, -(-rows // self.columns)


@frozen(kw_only=True)
class SmallWeights:
    """Weights by which other kernels multiply faster at one row."""

    side: int
    """Rows of W or inputs, whichever are fewer, at most."""
    weight_bytes: int
    """Bytes of W, at most."""

    def includes(self, shape: WeightOnlyShape) -> bool:
        """Whether a shape is one of them."""
        return min(shape.weight_rows, shape.inputs) <= self.side and shape.weight_bytes <= self.weight_bytes


SMALL_FLOAT8 = SmallWeights(side=4095, weight_bytes=2**25)


@frozen(kw_only=True)
class EightWarps:
    """A tile of eight warps for 8-bit weights, and where it is the fastest."""

    tile: FewRowsTile
    min_filled: float
    """Part of the programs that can run at the same time which the tiles of W fill, at least. They fill all at most."""
    min_blocks: int
    """Blocks of inputs that the warps divide, at least."""
    int8_only: bool = False

    def suits(self, shape: WeightOnlyShape, tiles: int, sms: int) -> bool:
        """Whether it is the fastest for a shape with this many tiles of W."""
        programs = self.tile.programs * sms
        is_filled = programs * self.min_filled <= tiles <= programs
        has_type = not self.int8_only or shape.layout.value_type == "signed"
        return is_filled and has_type and shape.blocks >= self.min_blocks


@frozen(kw_only=True)
class SplitTile:
    """A tile for 8-bit weights whose inputs several programs may divide."""

    tile: FewRowsTile
    """Without splits."""
    min_blocks: int
    """Blocks of inputs of a split, at least."""

    def split(self, shape: WeightOnlyShape, tiles: int, sms: int) -> FewRowsTile:
        """The tile with as many splits as can run at the same time, for a shape with this many tiles of W."""
        most = min(self.tile.programs * sms // tiles, shape.blocks // self.min_blocks)
        return evolve(self.tile, splits=even_splits(most, shape.blocks))


TWO_BY_TWO_WARPS = FewRowsTile(rows=32, warps=4, ahead=2, x_ahead=2, programs=3, row_warps=2)
"""4 bits: two warps divide the rows of W, and two the inputs."""
W8_MAX_TILES = 8
"""8 bits: most TILE_ROWS per multiprocessor, unless gated: more were not measured."""
W8_LONG_INPUTS = 2 * LONG_INPUTS
"""8 bits: with more blocks of 128 inputs than this, the inputs of a tile are split."""
EIGHT_WARPS = (
    EightWarps(tile=FewRowsTile(rows=16, warps=8, ahead=2, x_ahead=4, programs=2), min_filled=0.95, min_blocks=32),
    EightWarps(
        tile=FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3),
        min_filled=0.75,
        min_blocks=W8_LONG_INPUTS + 1,
        int8_only=True,
    ),
)
"""The first one that suits a shape is used."""
FOUR_WARPS = SplitTile(tile=FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4), min_blocks=24)
TWO_WARPS = SplitTile(tile=FewRowsTile(rows=16, warps=2, ahead=2, x_ahead=2, programs=8), min_blocks=8)
MAX_SMALL_TILES = 0.75
"""8 bits: with at most this many tiles of W per multiprocessor, inputs that are not long are split among four warps, so
that each split has at most BLOCKS_OF_ITERATION."""
BLOCKS_OF_ITERATION = 8
"""8 bits: blocks of inputs that four warps load ahead."""
THREE_AHEAD = range(9, 13)
"""8 bits: with as many blocks of 128 inputs, three blocks of each warp are loaded ahead. Then four warps have one loop
iteration and not two, and two warps two and not three: the linear layers of a decoder block take 1 to 9 % less."""
MIN_FILLED = 0.75
"""8 bits: programs have four warps if there are this part of those that can run at the same time; otherwise they have
two, and twice as many can run."""


def supports_few_rows(shape: WeightOnlyShape, rows: int) -> bool:
    """Whether a kernel for few rows has the layout of the weights, and x that many rows."""
    layout = shape.layout
    # Rows of x and of the result start at multiples of 16 bytes.
    if rows > MAX_FEW_ROWS or shape.inputs % 8 or shape.outputs % 8:
        return False
    has_groups = layout.scale_layout == "groups" and layout.bits == 4 and layout.span == SPANS[0]
    return has_groups or layout.scale_layout == "outputs"


def suits_few_rows(shape: WeightOnlyShape, rows: int, sms: int) -> bool:
    """Whether a kernel for few rows has the layout of the weights, and is the fastest."""
    if not supports_few_rows(shape, rows):
        return False
    if shape.layout.bits == 4:
        return True
    if rows == 1 and shape.layout.value_type == "float8" and SMALL_FLOAT8.includes(shape):
        return False
    return shape.gated or shape.weight_rows <= W8_MAX_TILES * TILE_ROWS * sms


def _w8_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """As `few_rows_tile`, for 8-bit weights."""
    tiles = -(-shape.weight_rows // TILE_ROWS)
    if tiles > 16 * sms:
        return FOUR_WARPS.tile
    if tiles > 8 * sms:
        return FewRowsTile(rows=64, warps=4, ahead=2, x_ahead=2, programs=4, row_warps=4)
    ahead = 3 if shape.blocks in THREE_AHEAD else 2
    if shape.gated and (tiles > 4 * sms or (ahead > 2 and tiles > 2 * sms)):
        return FewRowsTile(rows=32, warps=4, ahead=ahead, x_ahead=2, programs=4, row_warps=2)
    if tiles > 4 * sms:
        return TWO_WARPS.tile
    for eight in EIGHT_WARPS:
        if eight.suits(shape, tiles, sms):
            return eight.tile
    is_long = shape.blocks > W8_LONG_INPUTS
    if not is_long and (tiles > sms or shape.blocks < FOUR_WARPS.min_blocks):
        return evolve(FOUR_WARPS.tile, ahead=ahead)
    if not is_long and tiles <= MAX_SMALL_TILES * sms:
        most = min(FOUR_WARPS.tile.programs * sms // tiles, -(-shape.blocks // BLOCKS_OF_ITERATION))
        return evolve(FOUR_WARPS.tile, splits=even_splits(most, shape.blocks))
    four = FOUR_WARPS.split(shape, tiles, sms) if is_long else FOUR_WARPS.tile
    if tiles * four.splits >= four.programs * sms * MIN_FILLED:
        return four
    return TWO_WARPS.split(shape, tiles, sms)


def even_splits(most: int, blocks: int) -> int:
    """At most this many splits, at least one, of which none is without blocks."""
    return -(-blocks // -(-blocks // max(most, 1)))


def _w4_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """As `few_rows_tile`, for 4-bit weights."""
    tiles = -(-shape.weight_rows // TILE_ROWS)
    if shape.gated:
        return _w4_gated_tile(shape, tiles, sms)
    if tiles > 4 * sms:
        return FewRowsTile(rows=32, warps=4, ahead=1, x_ahead=4, programs=3)
    if shape.blocks <= SHORT_INPUTS and tiles <= 3 * sms:
        return _w4_short_tile(shape, tiles, sms)
    # Blocks of each of four warps.
    share = -(-shape.blocks // 4)
    if share == 1:
        return TWO_BY_TWO_WARPS
    if shape.blocks <= MEDIUM_INPUTS and tiles <= MAX_FEW_TILES * sms:
        return FewRowsTile(rows=16, warps=4, ahead=2 if share == 4 else 3, x_ahead=2, programs=3)
    if tiles <= sms or (shape.blocks > LONG_INPUTS and tiles <= 2 * sms):
        return FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=4, programs=2)
    if shape.blocks > LONG_INPUTS and tiles <= 3 * sms:
        return FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3)
    # More ahead, unless the last loop iteration would have fewer.
    if tiles <= 2 * sms and share % 4 == 0:
        return FewRowsTile(rows=16, warps=4, ahead=4, x_ahead=0, programs=3)
    if tiles <= 3 * sms and -(-share // 3) * 3 <= -(-share // 2) * 2:
        return FewRowsTile(rows=16, warps=4, ahead=3, x_ahead=2, programs=3)
    if tiles <= 3 * sms:
        return FewRowsTile(rows=32, warps=8, ahead=1, x_ahead=4, programs=2, row_warps=2)
    return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4)


def _w4_short_tile(shape: WeightOnlyShape, tiles: int, sms: int) -> FewRowsTile:
    """As `few_rows_tile`, for plain layers of 4-bit weights with SHORT_INPUTS and at most three tiles of TILE_ROWS per
    multiprocessor."""
    has_one_block_per_warp = shape.blocks <= 4
    if has_one_block_per_warp and tiles > sms:
        return TWO_BY_TWO_WARPS
    programs = 4 if tiles <= 1.5 * sms else 3
    return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=programs)


def _w4_gated_tile(shape: WeightOnlyShape, tiles: int, sms: int) -> FewRowsTile:
    """As `few_rows_tile`, for gated layers of 4-bit weights with this many tiles of TILE_ROWS."""
    is_short = shape.blocks <= SHORT_INPUTS
    # Each half of the warps has an even number of blocks, so that no loop iteration has fewer than two.
    has_even_halves = -(-shape.blocks // 2) % 2 == 0
    if is_short and has_even_halves and tiles <= 6 * sms:
        return TWO_BY_TWO_WARPS
    if tiles <= (7 if is_short else 8) * sms:
        return FewRowsTile(rows=32, warps=2, ahead=1, x_ahead=2, programs=8)
    if tiles <= 16 * sms:
        return FewRowsTile(rows=64, warps=4, ahead=1, x_ahead=2, programs=4, row_warps=2)
    return FewRowsTile(rows=32, warps=4, ahead=1, x_ahead=4, programs=3)


def few_rows_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """The tile for a shape that `suits_few_rows`, on a GPU with this many multiprocessors.

    All programs run at the same time where possible, with as many loads in progress as registers allow. These were the
    fastest, or nearly, in chains of the linear layers of decoder blocks on an H200 (as for
    weight_only_tiles.UNMEASURED_MAX_ROWS), and in whole steps of Llama-3.1-8B.
    """
    return _w8_tile(shape, sms) if shape.layout.bits == 8 else _w4_tile(shape, sms)
