"""Tiles of the grouped GEMMs of experts: the default for each number of tokens, and candidates for autotuning."""

from __future__ import annotations

from attrs import evolve, frozen

from engine.ops.experts import persistent_grouped as persistent
from engine.ops.experts.experts_mlp import ExpertsTile
from engine.ops.experts.grouped_matmul import GroupedTile
from engine.ops.experts.pack import BLOCK_INPUTS
from engine.ops.experts.weights import WeightFormat

ROW_CLASSES = (1, 8, 32, 128, 256, 512, 2048, 4096, 8192)
"""Row classes: a number of tokens uses the tiles of the smallest class that is not less, or of the last."""
TILE_ROWS = (16, 32, 64, 128)
"""Rows of a tile, by default the smallest that hold an expert's rows where all have the same number."""
FEW_ROWS = 8
"""Rows of a tile of 4-bit weights on Hopper for at most as many tokens, of which no expert has more rows."""
SHAPES = {
    16: ((32, 128, 4, 4), (64, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (128, 64, 4, 4)),
    32: ((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    128: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
}
"""(outputs, block_k, warps, stages) of the candidates, by rows of a tile; the first is the default, whose
shared memory every GPU from compute capability 8.0 on has for 16-bit weights."""
SHAPES_OF_4_BITS = {
    FEW_ROWS: ((64, 4, 3), (64, 4, 4), (32, 2, 4)),
    16: ((64, 4, 3), (64, 4, 4), (32, 4, 6)),
    32: ((64, 4, 4), (64, 4, 3)),
    64: ((64, 8, 3), (64, 4, 4), (128, 8, 3)),
    128: ((64, 4, 3), (128, 8, 3), (64, 8, 3)),
}
"""(outputs of gate and up, warps, stages) of the candidates of 4-bit weights; a tile of down has twice the outputs."""
MAX_CANDIDATE_ROWS = 2
"""How many of TILE_ROWS are tried: the default, and the next larger."""
MIN_DEQUANTIZED_ROWS = 512
"""Mean rows per expert, in the smallest step of a row class, from which on 4-bit weights may be dequantized before they
are multiplied. At 256 rows that is slower than dequantizing tile by tile: 1,384 to 947 us for gpt-oss-20b on an H200.
"""


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
    wgmma: bool = False
    """Whether the GPU has the instructions of the persistent kernel."""
    max_dequantized_bytes: int = 0
    """Bytes that the 4-bit weights of gate and up of all experts may take when they are dequantized."""

    def __str__(self) -> str:
        quantized = f", activations in {self.quantized}" if self.quantized else ""
        return (
            f"{self.rank_experts} of {self.num_experts} experts, top {self.top_k}, {self.hidden}x{self.intermediate}"
            f" {self.activation} {self.format}, {self.dtype}{quantized}"
        )

    def rows_per_expert(self, tokens: int) -> float:
        """Mean number of rows of an expert."""
        return tokens * self.top_k / self.num_experts

    @property
    def dequantizes(self) -> bool:
        """Whether 4-bit weights may be dequantized to 16 bits for the persistent kernel."""
        nbytes = self.rank_experts * 2 * self.intermediate * self.hidden * 2
        return self.format.is_4bit and nbytes <= self.max_dequantized_bytes

    @property
    def persistent_bits(self) -> int:
        """Bits per value that the persistent kernel multiplies; 0: it does not support the shape or the GPU."""
        kind = "plain" if self.dequantizes else self.format.kind
        bits = {"plain": 16, "channel": 8 if self.quantized else 0}.get(kind, 0)
        if not bits or not self.wgmma or self.dtype == "float32":
            return 0
        unit = persistent.ROW_ALIGNMENT * 8 // bits
        return bits if self.hidden % unit == 0 and self.intermediate % unit == 0 else 0


def row_class(tokens: int) -> int:
    """The row class of a number of tokens."""
    return next((size for size in ROW_CLASSES if size >= tokens), ROW_CLASSES[-1])


def default_tile(shape: ExpertsShape, tokens: int) -> ExpertsTile:
    """The tiles used unless others were chosen."""
    return candidates(shape, tokens)[0]


def candidates(shape: ExpertsShape, tokens: int) -> list[ExpertsTile]:
    """Tiles to measure for a row class, the default first: the same for both GEMMs."""
    default_rows = _default_rows(shape, tokens)
    first = TILE_ROWS.index(default_rows)
    all_rows = TILE_ROWS[first : first + MAX_CANDIDATE_ROWS]
    if shape.format.is_4bit and shape.wgmma and tokens <= FEW_ROWS:
        all_rows = (FEW_ROWS, *all_rows[:1])
    found = [tile for rows in all_rows for tile in _tiles(shape.format, rows)]
    if persistent.TILE_ROWS in all_rows and _can_persist(shape, tokens):
        found.insert(0 if default_rows == persistent.TILE_ROWS else len(found), _persistent_tile(shape))
    return found


def other_down_tiles(shape: ExpertsShape, tile: ExpertsTile) -> list[ExpertsTile]:
    """The same tile for gate and up, with others for down, which read the same format of weights."""
    others = [] if tile.dequantized else _tiles(shape.format, tile.rows)
    if tile.rows == persistent.TILE_ROWS and shape.persistent_bits and not shape.dequantizes:
        others.append(_persistent_tile(shape))
    return [evolve(tile, down=other.down) for other in others if other.down != tile.down]


def _default_rows(shape: ExpertsShape, tokens: int) -> int:
    rows = shape.rows_per_expert(tokens)
    return next((size for size in TILE_ROWS if size >= rows), TILE_ROWS[-1])


def _can_persist(shape: ExpertsShape, tokens: int) -> bool:
    """Whether the persistent kernel is a candidate for the row class of a number of tokens."""
    smallest = max((size for size in ROW_CLASSES if size < tokens), default=0) + 1
    pays = not shape.dequantizes or shape.rows_per_expert(smallest) >= MIN_DEQUANTIZED_ROWS
    return shape.persistent_bits > 0 and pays


def _tiles(form: WeightFormat, rows: int) -> list[ExpertsTile]:
    """The distinct tiles of SHAPES, or SHAPES_OF_4_BITS, for a format."""
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


def _persistent_tile(shape: ExpertsShape) -> ExpertsTile:
    """The only tile of the persistent kernel."""
    down = GroupedTile(
        outputs=persistent.TILE_OUTPUTS,
        block_k=persistent.STEP_BYTES * 8 // shape.persistent_bits,
        warps=persistent.WARPS,
        stages=persistent.STAGES,
        persistent=True,
    )
    gate_up = evolve(down, outputs=down.outputs // 2)
    return ExpertsTile(rows=persistent.TILE_ROWS, gate_up=gate_up, down=down, dequantized=shape.dequantizes)
