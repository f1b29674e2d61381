"""Tiles of the grouped GEMMs of experts: the default for each number of tokens, and candidates for autotuning."""

from __future__ import annotations

from attrs import evolve, frozen

from engine.ops.experts.experts_mlp import ExpertsTile
from engine.ops.experts.grouped_matmul import GroupedTile
from engine.ops.experts.pack import BLOCK_INPUTS
from engine.ops.experts.weights import WeightFormat

ROW_CLASSES = (1, 8, 32, 128, 256, 512, 2048, 8192)
"""Row classes: a number of tokens uses the tiles of the smallest class that is not less, or of the last."""
TILE_ROWS = (16, 32, 64, 128)
"""Rows of a tile, by default the smallest that hold an expert's rows where all have the same number."""
SHAPES = {
    16: ((32, 128, 4, 4), (64, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (128, 64, 4, 4)),
    32: ((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    128: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
}
"""(outputs, block_k, warps, stages) of the candidates, by rows of a tile; the first is the default, whose
shared memory every GPU from compute capability 8.0 on has for 16-bit weights."""
SHAPES_OF_4_BITS = {
    16: ((64, 4, 3), (64, 4, 4), (32, 4, 6)),
    32: ((64, 4, 4), (64, 4, 3)),
    64: ((64, 8, 3), (64, 4, 4), (128, 8, 3)),
    128: ((64, 4, 3), (128, 8, 3), (64, 8, 3)),
}
"""(outputs of gate and up, warps, stages) of the candidates of 4-bit weights; a tile of down has twice the outputs."""
MAX_CANDIDATE_ROWS = 2
"""How many numbers of rows are tried: the default, and the next larger."""


@frozen(kw_only=True)
class ExpertsShape:
    """Sizes and format of a layer's experts on one rank."""

    num_experts: int
    """Over all ranks."""
    rank_experts: int
    top_k: int
    hidden: int
    intermediate: int
    """On this rank."""
    format: WeightFormat
    activation: str
    dtype: str
    quantized: str = ""
    """The dtype that activations of many rows are quantized to; empty: none."""

    def __str__(self) -> str:
        quantized = f", activations in {self.quantized}" if self.quantized else ""
        return (
            f"{self.rank_experts} of {self.num_experts} experts, top {self.top_k}, {self.hidden}x{self.intermediate}"
            f" {self.activation} {self.format}, {self.dtype}{quantized}"
        )

    def rows_per_expert(self, tokens: int) -> float:
        """Mean number of rows of an expert."""
        return tokens * self.top_k / self.num_experts


def row_class(tokens: int) -> int:
    """The row class of a number of tokens."""
    return next((size for size in ROW_CLASSES if size >= tokens), ROW_CLASSES[-1])


def default_tile(shape: ExpertsShape, tokens: int) -> ExpertsTile:
    """The tiles used unless others were chosen."""
    return _tiles(shape.format, _default_rows(shape, tokens))[0]


def candidates(shape: ExpertsShape, tokens: int) -> list[ExpertsTile]:
    """Tiles to measure for a row class, the default first: the same for both GEMMs."""
    first = TILE_ROWS.index(_default_rows(shape, tokens))
    return [tile for rows in TILE_ROWS[first : first + MAX_CANDIDATE_ROWS] for tile in _tiles(shape.format, rows)]


def other_down_tiles(shape: ExpertsShape, tile: ExpertsTile) -> list[ExpertsTile]:
    """The same tile for gate and up, with others for down."""
    return [evolve(tile, down=other.down) for other in _tiles(shape.format, tile.rows) if other.down != tile.down]


def _default_rows(shape: ExpertsShape, tokens: int) -> int:
    rows = shape.rows_per_expert(tokens)
    return next((size for size in TILE_ROWS if size >= rows), TILE_ROWS[-1])


def _tiles(form: WeightFormat, rows: int) -> list[ExpertsTile]:
    """The different tiles for a format."""
    if form.is_4bit:
        return [_tile_of_4_bits(rows, *shape) for shape in SHAPES_OF_4_BITS[rows]]
    found = []
    for outputs, block_k, warps, stages in SHAPES[rows]:
        one = GroupedTile(outputs=outputs, block_k=form.block_k(block_k), warps=warps, stages=stages)
        found.append(ExpertsTile(rows=rows, gate_up=one, down=one))
    return list(dict.fromkeys(found))


def _tile_of_4_bits(rows: int, outputs: int, warps: int, stages: int) -> ExpertsTile:
    gate_up = GroupedTile(outputs=outputs, block_k=BLOCK_INPUTS, warps=warps, stages=stages)
    return ExpertsTile(rows=rows, gate_up=gate_up, down=evolve(gate_up, outputs=2 * outputs))
