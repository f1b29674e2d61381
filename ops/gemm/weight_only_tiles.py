"""Tiles of the weight-only kernels: which one at how many rows, and which ones are worth a measurement."""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from engine.ops.gemm.packed_layout import CodeLayout, Layout
from engine.ops.gemm.skinny_launch import MOST_PROGRAMS, MOST_SUMS

MOST_ROWS = 256
"""Up to so many rows of x the weights are unpacked tile by tile as they are multiplied. Beyond, unpacking them all to
memory takes a small share of the multiplication, and the library multiplies faster than these tiles."""
MOST_SPLITS = 16
COLUMNS = (8, 16, 32, 64, 128)
"""Rows of x that a tile has room for."""
ROW_CLASSES = (*COLUMNS, MOST_ROWS)
"""Numbers of rows of x that a tile is chosen for; fewer take the next one's."""


@frozen(kw_only=True)
class GemmShape:
    """A multiplication by one weight matrix."""

    gated: bool
    """Whether the outputs are silu(gate) * up of W's two halves."""
    weight_rows: int
    inputs: int
    layout: Layout | CodeLayout
    dtype: torch.dtype = torch.bfloat16
    """Of x."""
    zeros: bool = False
    """Whether there are zero points."""

    def __str__(self) -> str:
        kind, zeros = "gated " if self.gated else "", " with zero points" if self.zeros else ""
        return f"{kind}{self.weight_rows}x{self.inputs} {self.layout}{zeros}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def outputs(self) -> int:
        """Numbers in a row of the result."""
        return self.weight_rows // 2 if self.gated else self.weight_rows

    @property
    def blocks(self) -> int:
        """Of the layout."""
        return -(-self.inputs // self.layout.block)


@frozen(kw_only=True)
class Tile:
    """What a program takes at once."""

    rows: int
    """Of W."""
    columns: int
    """Rows of x it has room for."""
    warps: int
    stages: int
    """Steps whose operands are on their way to shared memory at once."""
    early: bool = False
    """Whether W is scaled before it is multiplied, not the sums of each group: less work where x has many rows."""
    step: int = 256
    """Inputs taken at once, at most; fewer than a block has leave room in shared memory for more rows of x."""
    splits: int = 1
    """Programs that share the blocks of one tile."""

    def __str__(self) -> str:
        scaled = "weights" if self.early else "sums"
        sizes = (
            f"{self.rows}x{self.columns}x{self.step}, {self.warps} warps, {self.stages} stages, {self.splits} splits"
        )
        return f"{sizes}, scaled {scaled}"

    def programs(self, problem: GemmShape, rows: int) -> int:
        """Tiles of the result."""
        return -(-problem.weight_rows // self.rows) * -(-rows // self.columns)

    def grid(self, weight_rows: int, rows: int) -> tuple[int, int, int]:
        """Programs, for so many rows of W and of x."""
        return -(-weight_rows // self.rows), self.splits, -(-rows // self.columns)

    def parts(self, layout: Layout | CodeLayout) -> int:
        """Steps that a block takes, each with its share of every span."""
        return max(layout.block // self.step, 1)

    def shared_memory(self, layout: Layout | CodeLayout) -> int:
        """Bytes that a program needs, as compiled: x stays in shared memory while it is multiplied."""
        parts = self.parts(layout)
        words, x = self.rows * layout.span // parts * 2, self.columns * layout.block // parts * 2
        scales = self.rows * layout.groups * 4
        return (words + scales) * (self.stages - 1) + x * self.stages


@frozen(kw_only=True)
class VectorTile:
    """What a program of the kernel for one row of x has in registers."""

    rows: int
    """Of W."""
    blocks: int
    """Of the layout, side by side."""
    warps: int

    def __str__(self) -> str:
        return f"vector {self.rows} x {self.blocks} blocks, {self.warps} warps"

    def grid(self, weight_rows: int, rows: int) -> tuple[int, int]:
        """Programs, for so many rows of W and of x."""
        return -(-weight_rows // self.rows), rows


TILES = {
    16: Tile(rows=128, columns=16, warps=4, stages=6),
    32: Tile(rows=64, columns=32, warps=4, stages=4),
    64: Tile(rows=64, columns=64, warps=4, stages=3),
    128: Tile(rows=128, columns=128, warps=8, stages=3, early=True, step=128),
}
"""By rows of x: the fastest, or nearly, of those that benchmarks/quant_kernels.py --tune tries, on an H200."""
TILE_OF_32_CODES = Tile(rows=64, columns=32, warps=2, stages=4)
"""For 32 rows and a CodeLayout."""
FEW = 8
"""Up to so many rows of x tiles follow from rules, and are not measured: a layer by itself tells too little, since it
overlaps with those before and behind it. The rules say what was fastest in a chain of all linear layers of a block, of
Llama-3.1-8B and of Qwen3-0.6B, on an H200."""
FEW_SMALL = Tile(rows=64, columns=FEW, warps=4, stages=6)
FEW_LARGE = Tile(rows=128, columns=FEW, warps=4, stages=4)
"""Where all multiprocessors have one: for a CodeLayout without splits, for a Layout with them."""
WARP_PAIRS = 128
"""Pairs of words of a row of W that a warp has at once, by a VectorTile: four a thread."""
MOST_VECTOR_BYTES = 2**24
"""Of 4-bit words: to go through more of them number by number takes longer than to read them."""
BUSY_WARPS = 5
"""That a multiprocessor should have at least."""


def choose(problem: GemmShape, rows: int, sms: int, shared: int) -> Tile | VectorTile | None:
    """The tile for so many rows of x; None: unpack, and leave it to the library.

    sms: multiprocessors of the GPU; shared: bytes of shared memory that a program may have.
    """
    if rows == 1 and _suits_vector(problem, sms):
        return _vector(problem, sms)
    return matrix_tile(problem, rows, sms, shared)


def matrix_tile(problem: GemmShape, rows: int, sms: int, shared: int) -> Tile | None:
    """The same of those that go through the tensor cores."""
    if rows > MOST_ROWS:
        return None
    wanted = next((size for size in COLUMNS if size >= rows), COLUMNS[-1])
    for columns in reversed([size for size in COLUMNS if size <= wanted]):
        tile = _usual(problem, columns, sms)
        for stages in range(tile.stages, 1, -1):
            fitting = _for_layout(evolve(tile, stages=stages), problem.layout)
            if fitting.shared_memory(problem.layout) <= shared:
                return split(fitting, problem, rows, sms)
    return None


def _suits_vector(problem: GemmShape, sms: int) -> bool:
    """Whether the kernel for one row of x is the fastest."""
    if problem.inputs % 2:  # which it reads in pairs
        return False
    if problem.layout.scaled != "groups":
        return FEW_LARGE.programs(problem, 1) < sms
    return problem.layout.bits == 8 or problem.weight_rows * problem.inputs // 2 <= MOST_VECTOR_BYTES


def _vector(problem: GemmShape, sms: int) -> VectorTile:
    """More rows of W at once where there are enough for all multiprocessors; then 4-bit ones, of which a thread has
    more to do, a warp at a time."""
    many = problem.weight_rows >= 16 * sms
    warps = 1 if many and problem.layout.bits == 4 else 2
    return VectorTile(rows=4 if many else 2, blocks=WARP_PAIRS * warps * 2 // problem.layout.span, warps=warps)


def _usual(problem: GemmShape, columns: int, sms: int) -> Tile:
    """The tile with room for so many rows of x, if it fits; not split yet."""
    codes = problem.layout.scaled != "groups"
    if columns == FEW:
        large = FEW_LARGE if codes else split(FEW_LARGE, problem, columns, sms)
        return evolve(large, splits=1) if large.programs(problem, columns) * large.splits >= sms else FEW_SMALL
    return TILE_OF_32_CODES if codes and columns == TILE_OF_32_CODES.columns else TILES[columns]


def _for_layout(tile: Tile, layout: Layout | CodeLayout) -> Tile:
    """Without what makes no difference there."""
    return evolve(tile, early=tile.early and layout.scaled != "outputs", step=min(tile.step, layout.block))


def split(tile: Tile, problem: GemmShape, rows: int, sms: int) -> Tile:
    """Blocks shared out so that all multiprocessors are busy, if that can be."""
    programs, splits = tile.programs(problem, rows), 1
    most = min(MOST_SPLITS, problem.blocks // 2)
    while programs * splits * tile.warps < sms * BUSY_WARPS and splits * 2 <= most and fits(tile, programs, splits * 2):
        splits *= 2
    return evolve(tile, splits=splits)


def fits(tile: Tile, programs: int, splits: int) -> bool:
    """Whether so many programs, each with so many splits, have room for their sums."""
    return programs <= MOST_PROGRAMS and programs * splits * tile.rows * tile.columns <= MOST_SUMS


MEASURED_CLASSES = (16, 32, 64, 128, 256)
"""Of ROW_CLASSES those that are measured at start. Of up to 8 rows a layer by itself tells too little: it overlaps with
those before and behind it, and what won alone made a step of Llama-3.1-8B in float8 3.39 ms long in place of 2.90."""
SHAPES = {
    16: ((32, 2, 6), (64, 2, 4), (64, 2, 6), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6), (128, 8, 4)),
    32: ((32, 2, 4), (64, 2, 4), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)),
    64: ((128, 4, 3), (128, 8, 3)),
}
"""Rows of W, warps and stages of the tiles to try, by rows of x that they have room for."""
SHAPES_EARLY = {
    64: ((64, 64, 4, 4, 32), (128, 64, 4, 4, 32)),
    128: ((64, 128, 4, 3, 32), (128, 128, 8, 3, 64)),
    256: ((128, 128, 8, 3, 64),),
}
"""Rows of W, rows of x, warps, stages, and words of a row at once, of those that scale weights, by class."""
LEAST_DOUBLED = 128
"""From how many rows of x on twice as many splits are tried: a multiprocessor may do better with two programs."""


def candidates(problem: GemmShape, rows: int, sms: int, shared: int) -> list[Tile | None]:
    """Tiles for one of MEASURED_CLASSES, what `choose` says first; None: the library.

    sms: multiprocessors of the GPU; shared: bytes of shared memory that a program may have.
    """
    usual = matrix_tile(problem, rows, sms, shared)
    if usual is None:  # no tile fits
        return [None]
    wanted = [
        Tile(rows=tile_rows, columns=usual.columns, warps=warps, stages=stages)
        for tile_rows, warps, stages in SHAPES.get(usual.columns, ())
    ]
    for tile_rows, columns, warps, stages, words in SHAPES_EARLY.get(rows, ()):
        step = words * problem.layout.block // problem.layout.span
        wanted.append(Tile(rows=tile_rows, columns=columns, warps=warps, stages=stages, early=True, step=step))
    fitting = (_for_layout(tile, problem.layout) for tile in wanted)
    found = [
        usual,
        *(split(tile, problem, rows, sms) for tile in fitting if tile.shared_memory(problem.layout) <= shared),
    ]
    if rows >= LEAST_DOUBLED:
        found += [
            twice for tile in found for twice in other_splits(tile, problem, rows) if twice.splits == tile.splits * 2
        ]
    return list(dict.fromkeys(found))


def other_splits(tile: Tile, problem: GemmShape, rows: int) -> list[Tile]:
    """The same tile with half, twice and four times as many splits, where there is something to split."""
    programs = tile.programs(problem, rows)
    most = min(MOST_SPLITS, problem.blocks // 2)
    numbers = [tile.splits // 2, tile.splits * 2, tile.splits * 4]
    return [
        evolve(tile, splits=splits)
        for splits in numbers
        if splits == 1 or (1 < splits <= most and fits(tile, programs, splits))
    ]
