"""Tiles of the weight-only kernels, and the default for each number of rows.

The kernels compute W x^T: rows of a tile are rows of W, columns of a tile are rows of x.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from engine.ops.gemm.few_rows_tile import FewRowsTile, few_rows_tile, suits_few_rows
from engine.ops.gemm.packed_layout import WeightLayout
from engine.ops.gemm.persistent_tile import PersistentTile
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, MAX_SPLIT_TILES, Workspace

WEIGHT_ONLY_MAX_ROWS = 256
"""Up to this many rows of x, a WeightOnlyTile is faster than dequantizing the whole matrix to memory and multiplying
by cuBLAS."""
MAX_SPLITS = 16
COLUMNS = (8, 16, 32, 64, 128)
"""Columns that a tile may have."""
ROW_CLASSES = (*COLUMNS, WEIGHT_ONLY_MAX_ROWS, 512, 1024, 4096)
"""Row classes: a number of rows of x uses the tile of the smallest class that is not less, or of the last."""


@frozen(kw_only=True)
class WeightOnlyShape:
    """Shape and format of a weight-only GEMM."""

    gated: bool
    """Whether the outputs are act(gate) * up, of the first and second half of W's rows."""
    weight_rows: int
    """Rows of W."""
    inputs: int
    layout: WeightLayout
    dtype: torch.dtype = torch.bfloat16
    """Dtype of x."""
    zeros: bool = False
    """Whether there are zero points."""
    activation: str = "silu"
    """Activation of a gated GEMM; one of ACTIVATIONS."""

    def __str__(self) -> str:
        kind = "" if not self.gated else "gated " if self.activation == "silu" else f"gated by {self.activation} "
        zeros = " with zero points" if self.zeros else ""
        return f"{kind}{self.weight_rows}x{self.inputs} {self.layout}{zeros}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.weight_rows // 2 if self.gated else self.weight_rows

    @property
    def weight_bytes(self) -> int:
        """Bytes of W without scales."""
        return self.weight_rows * self.inputs * self.layout.bits // 8

    @property
    def blocks(self) -> int:
        """Blocks of the layout per row of W."""
        return -(-self.inputs // self.layout.block)


@frozen(kw_only=True)
class WeightOnlyTile:
    """A tile of the tensor-core kernel, `weight_only.matmul_kernel`."""

    rows: int
    """Rows of W."""
    columns: int
    """Rows of x."""
    warps: int
    stages: int
    """Software pipeline stages: loop iterations with operands in shared memory."""
    scales_weights: bool = False
    """Whether weights are scaled before they are multiplied, rather than the sums of each group afterwards: less work
    where x has many rows."""
    step: int = 256
    """Maximum inputs per loop iteration. Less than a block leaves room in shared memory for more rows of x."""
    splits: int = 1
    """Split-K: programs that divide the inputs of one tile."""
    ahead: int = 0
    """Blocks of each row of W to prefetch into the L2 cache before x is written: a power of two, or 0."""

    def __str__(self) -> str:
        scaled = "weights" if self.scales_weights else "sums"
        sizes = (
            f"{self.rows}x{self.columns}x{self.step}, {self.warps} warps, {self.stages} stages, {self.splits} splits"
        )
        ahead = f", {self.ahead} blocks ahead" if self.ahead else ""
        return f"{sizes}, scaled {scaled}{ahead}"

    def programs(self, shape: WeightOnlyShape, rows: int) -> int:
        """Tiles of the result."""
        return -(-shape.weight_rows // self.rows) * -(-rows // self.columns)

    def grid(self, weight_rows: int, rows: int) -> tuple[int, int, int]:
        """Launch grid for these numbers of rows of W and of x."""
        return -(-weight_rows // self.rows), self.splits, -(-rows // self.columns)

    def polled(self, weight_rows: int, rows: int, workspace: Workspace) -> int:
        """As Workspace.polled, for these numbers of rows of W and of x."""
        tiles, splits, columns = self.grid(weight_rows, rows)
        return workspace.polled(splits, self.rows * self.columns, tiles * columns)

    def parts(self, layout: WeightLayout) -> int:
        """Loop iterations per block. Each takes an equal part of every span."""
        return max(layout.block // self.step, 1)

    def shared_memory(self, layout: WeightLayout) -> int:
        """Bytes of shared memory per program, as compiled: x stays there while it is multiplied."""
        parts = self.parts(layout)
        packed, x = self.rows * layout.span // parts * 2, self.columns * layout.block // parts * 2
        scales = self.rows * layout.groups * 4
        return (packed + scales) * (self.stages - 1) + x * self.stages


@frozen(kw_only=True)
class WeightOnlyVectorTile:
    """A tile of the kernel for one row of x, `weight_only_vector.vector_kernel`. The tile is in registers."""

    rows: int
    """Rows of W."""
    blocks: int
    """Consecutive blocks of the layout per loop iteration."""
    warps: int

    def __str__(self) -> str:
        return f"vector {self.rows} x {self.blocks} blocks, {self.warps} warps"

    def grid(self, weight_rows: int, rows: int) -> tuple[int, int]:
        """Launch grid for these numbers of rows of W and of x."""
        return -(-weight_rows // self.rows), rows


MeasuredTile = WeightOnlyTile | PersistentTile | FewRowsTile | None
GemmTile = WeightOnlyTile | WeightOnlyVectorTile | FewRowsTile | PersistentTile
Tile = GemmTile | None
"""How a number of rows is multiplied. None: the matrix is dequantized and multiplied by cuBLAS."""

TILES = {
    16: WeightOnlyTile(rows=128, columns=16, warps=4, stages=6),
    32: WeightOnlyTile(rows=64, columns=32, warps=4, stages=4),
    64: WeightOnlyTile(rows=64, columns=64, warps=4, stages=3),
    128: WeightOnlyTile(rows=128, columns=128, warps=8, stages=3, scales_weights=True, step=128),
}
"""Columns -> default tile: the fastest, or nearly, that benchmarks/quant_kernels.py --tune tries on an H200."""
W8_TILE_OF_32_COLUMNS = WeightOnlyTile(rows=64, columns=32, warps=2, stages=4)
"""Replaces TILES[32] for a W8Layout."""
UNMEASURED_MAX_ROWS = 8
"""Up to this many rows of x, tiles follow from rules and are not measured: the time of a layer alone says too little,
since its kernel overlaps with the kernels before and after. The rules choose what was fastest on an H200 in chains of
linear layers: those of a decoder block of Llama-3.1-8B and of Qwen3-0.6B (benchmarks/quant_chain.py), and pairs of 24
other sizes."""
FINE_TILE = WeightOnlyTile(rows=32, columns=UNMEASURED_MAX_ROWS, warps=2, stages=6)
"""For 2 to UNMEASURED_MAX_ROWS rows, unless large tiles keep all multiprocessors busy or 4-bit weights are large
(`_suits_fine_tile`): its programs are so small that they are distributed evenly."""
FINEST_TILE = WeightOnlyTile(rows=16, columns=UNMEASURED_MAX_ROWS, warps=1, stages=6, ahead=2)
"""Replaces FINE_TILE for a W8Layout of at most MAX_FINEST_WEIGHTS."""
MAX_FINEST_WEIGHTS = 2**24
"""Bytes of 8-bit weights up to which FINEST_TILE is the fastest."""
MAX_FINE_WEIGHTS = {False: 2**24, True: 2**25}
"""Whether a GEMM is gated -> bytes of 4-bit weights up to which FINE_TILE is the fastest."""
SMALL_WEIGHTS = 2**23
"""Bytes of weights below which the time is mostly latency. Fine tiles are used whatever the shape; of weights in groups
FINE_TILE prefetches, and is split less."""
PROGRAMS_PER_SM = 3
PROGRAMS_PER_SM_OF_SMALL_WEIGHTS = 2
"""Programs of FINE_TILE per multiprocessor, at most, if it is split; of SMALL_WEIGHTS."""
MIN_FILLED = 0.9
"""With less than this part of PROGRAMS_PER_SM, FINE_TILE is split once more for a W8Layout, if that makes at most one
more program per multiprocessor."""
PROGRAMS_PER_SM_OF_FINEST_TILE = 4
"""Programs of FINEST_TILE per multiprocessor, at most, if it is split."""
INPUTS_PER_SPLIT = {8: 256, 4: 768}
"""Bits of a weight -> inputs per split: a fine tile has at most one split per this many inputs, or part of them."""
MAX_UNSPLIT_INPUTS = 1024
"""Up to this many inputs, a fine tile is not split if three of four multiprocessors have a tile."""
PREFETCHED_BLOCKS = {8: 4, 4: 8}
"""Bits of a weight -> blocks of each row that FINE_TILE prefetches of small weights."""
SMALL_TILE = WeightOnlyTile(rows=64, columns=UNMEASURED_MAX_ROWS, warps=4, stages=6)
LARGE_TILE = WeightOnlyTile(rows=128, columns=UNMEASURED_MAX_ROWS, warps=4, stages=4)
"""Used where it has at least one program per multiprocessor: without splits for a W8Layout, with splits for a
GroupedLayout."""
WARP_PAIRS = 128
"""Pairs of words of a row of W per warp of a WeightOnlyVectorTile: four per thread."""
MAX_VECTOR_BYTES = 2**24
"""Bytes of 4-bit weights up to which the vector kernel is used: with more, its arithmetic takes longer than the
reads."""
BUSY_WARPS = 5
"""Minimum warps per multiprocessor that splitting aims for."""

PERSISTENT_ROWS = (65, 512)
"""From how many, and up to how many, rows of x a PersistentTile is the default on GPUs with wgmma: faster than other
tiles at 128 and 256 rows for all linear layers of Llama-3.1-8B on an H200, and at 512 for the two measured."""


def default_tile(shape: WeightOnlyShape, rows: int, sms: int, shared: int, *, wgmma: bool = False) -> Tile:
    """The tile used unless another was chosen. None: dequantize the matrix and multiply by cuBLAS.

    rows: of x. sms: multiprocessors of the GPU. shared: bytes of shared memory per program. wgmma: whether the GPU has
    it.
    """
    is_persistent = wgmma and PersistentTile.supports(shape)
    if wgmma and suits_few_rows(shape, rows, sms):
        return few_rows_tile(shape, sms)
    if rows == 1 and _suits_vector(shape, sms):
        return _vector(shape, sms)
    if is_persistent and PERSISTENT_ROWS[0] <= rows <= PERSISTENT_ROWS[1]:
        return PersistentTile(columns=128 if rows <= 128 else 256)
    return tensor_core_tile(shape, rows, sms, shared)


def tensor_core_tile(shape: WeightOnlyShape, rows: int, sms: int, shared: int) -> WeightOnlyTile | None:
    """As `default_tile`, among the tiles of the tensor-core kernel."""
    if rows > WEIGHT_ONLY_MAX_ROWS:
        return None
    if _suits_fine_tile(shape, rows, sms):
        tile = fine_tile(shape, rows, sms)
        if tile.shared_memory(shape.layout) <= shared:
            return tile
    wanted = next((size for size in COLUMNS if size >= rows), COLUMNS[-1])
    for columns in reversed([size for size in COLUMNS if size <= wanted]):
        tile = _unsplit_default(shape, columns, sms)
        for stages in range(tile.stages, 1, -1):
            fitting = for_layout(evolve(tile, stages=stages), shape.layout)
            if fitting.shared_memory(shape.layout) <= shared:
                return with_splits(fitting, shape, rows, sms)
    return None


def _suits_fine_tile(shape: WeightOnlyShape, rows: int, sms: int) -> bool:
    """Whether FINE_TILE or FINEST_TILE is the fastest."""
    if not 1 < rows <= UNMEASURED_MAX_ROWS:
        return False
    if shape.layout.scale_layout == "groups":
        is_fine = shape.layout.bits == 4 and shape.weight_bytes <= MAX_FINE_WEIGHTS[shape.gated]
        return is_fine or shape.weight_bytes < SMALL_WEIGHTS
    return shape.weight_bytes < SMALL_WEIGHTS or shape.gated or LARGE_TILE.programs(shape, rows) < sms


def fine_tile(shape: WeightOnlyShape, rows: int, sms: int) -> WeightOnlyTile:
    """FINE_TILE or FINEST_TILE, with splits and prefetching for a shape."""
    bits, is_w8 = shape.layout.bits, shape.layout.scale_layout != "groups"
    is_finest = is_w8 and shape.weight_bytes <= MAX_FINEST_WEIGHTS
    is_small = not is_w8 and shape.weight_bytes < SMALL_WEIGHTS
    tile = for_layout(FINEST_TILE if is_finest else FINE_TILE, shape.layout)
    programs = tile.programs(shape, rows)
    if shape.inputs > MAX_UNSPLIT_INPUTS or programs * 4 < sms * 3:
        most = sms * (PROGRAMS_PER_SM_OF_SMALL_WEIGHTS if is_small else PROGRAMS_PER_SM)
        if is_finest:
            most = sms * PROGRAMS_PER_SM_OF_FINEST_TILE
        elif is_w8 and programs <= most and most // programs * programs < most * MIN_FILLED:
            more = (most // programs + 1) * programs
            most = more if more <= sms * (PROGRAMS_PER_SM + 1) else most
        useful = -(-shape.inputs // INPUTS_PER_SPLIT[bits])
        tile = with_even_splits(tile, shape, rows, min(most, useful * programs))
    return evolve(tile, ahead=PREFETCHED_BLOCKS[bits]) if is_small else tile


def with_even_splits(tile: WeightOnlyTile, shape: WeightOnlyShape, rows: int, most: int) -> WeightOnlyTile:
    """The tile with as many splits as make at most `most` programs, of which none is without work."""
    programs = tile.programs(shape, rows)
    splits = max(min(MAX_SPLITS, shape.blocks, most // programs), 1)
    splits = -(-shape.blocks // -(-shape.blocks // splits))
    while splits > 1 and not fits_workspace(tile, programs, splits):
        splits -= 1
    return evolve(tile, splits=splits)


def _suits_vector(shape: WeightOnlyShape, sms: int) -> bool:
    """Whether the kernel for one row of x is the fastest."""
    if shape.inputs % 2:  # that kernel reads inputs in pairs
        return False
    if shape.layout.scale_layout != "groups":
        return LARGE_TILE.programs(shape, 1) < sms
    return shape.layout.bits == 8 or shape.weight_rows * shape.inputs // 2 <= MAX_VECTOR_BYTES


def _vector(shape: WeightOnlyShape, sms: int) -> WeightOnlyVectorTile:
    """Tiles of more rows where W has enough for all multiprocessors; of 4-bit weights, which are more work per thread,
    by one warp."""
    many = shape.weight_rows >= 16 * sms
    warps = 1 if many and shape.layout.bits == 4 else 2
    return WeightOnlyVectorTile(rows=4 if many else 2, blocks=WARP_PAIRS * warps * 2 // shape.layout.span, warps=warps)


def _unsplit_default(shape: WeightOnlyShape, columns: int, sms: int) -> WeightOnlyTile:
    """The default tile with this many columns, without splits. It may exceed shared memory."""
    is_w8 = shape.layout.scale_layout != "groups"
    if columns == UNMEASURED_MAX_ROWS:
        large = LARGE_TILE if is_w8 else with_splits(LARGE_TILE, shape, columns, sms)
        return evolve(large, splits=1) if large.programs(shape, columns) * large.splits >= sms else SMALL_TILE
    return W8_TILE_OF_32_COLUMNS if is_w8 and columns == W8_TILE_OF_32_COLUMNS.columns else TILES[columns]


def for_layout(tile: WeightOnlyTile, layout: WeightLayout) -> WeightOnlyTile:
    """Normalize the fields that make no difference for a layout."""
    return evolve(
        tile, scales_weights=tile.scales_weights and layout.scale_layout != "outputs", step=min(tile.step, layout.block)
    )


def with_splits(tile: WeightOnlyTile, shape: WeightOnlyShape, rows: int, sms: int) -> WeightOnlyTile:
    """The tile with as many splits as keep all multiprocessors busy, if possible."""
    programs, splits = tile.programs(shape, rows), 1
    max_splits = min(MAX_SPLITS, shape.blocks // 2)
    while (
        programs * splits * tile.warps < sms * BUSY_WARPS
        and splits * 2 <= max_splits
        and fits_workspace(tile, programs, splits * 2)
    ):
        splits *= 2
    return evolve(tile, splits=splits)


def fits_workspace(tile: WeightOnlyTile, programs: int, splits: int) -> bool:
    """Whether the workspace has room for the partial sums of this many tiles and splits."""
    return programs <= MAX_SPLIT_TILES and programs * splits * tile.rows * tile.columns <= MAX_PARTIAL_SUMS
