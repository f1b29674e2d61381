"""Launches of the weight-only kernels: which tile at how many rows, and from when on the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from attrs import evolve, frozen

from engine.core.kernels import skinny
from engine.core.kernels.activation import silu_and_mul
from engine.core.kernels.launch import dependent_launch, num_sms, shared_memory
from engine.core.kernels.skinny_launch import MOST_PROGRAMS, MOST_SUMS, Workspace
from engine.plugins.kernels import weight_only
from engine.plugins.quant.layout import CodeLayout, Layout

MOST_ROWS = 256
"""Up to so many rows of x the weights are unpacked tile by tile as they are multiplied. Beyond, unpacking them all to
memory takes a small share of the multiplication, and the library multiplies faster than these tiles."""
MOST_SPLITS = 16
COLUMNS = (8, 16, 32, 64, 128)
"""Rows of x that a tile has room for."""
SCALE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
CODES = {"unsigned": weight_only.UNSIGNED, "signed": weight_only.SIGNED, "float8": weight_only.FLOAT8}
SCALES = {
    "groups": weight_only.GROUPS_OF_INPUTS,
    "outputs": weight_only.OUTPUTS,
    "blocks": weight_only.BLOCKS,
}
UNPACK_ROWS = 32
"""Outputs that a program unpacks."""


@frozen(kw_only=True)
class Problem:
    """A multiplication by one weight matrix."""

    gated: bool
    """Whether the outputs are silu(gate) * up of W's two halves."""
    weight_rows: int
    inputs: int
    layout: Layout | CodeLayout

    def __str__(self) -> str:
        kind = "gated " if self.gated else ""
        return f"{kind}{self.weight_rows}x{self.inputs} {self.layout}"

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
    """Blocks on their way to shared memory at once."""
    early: bool = False
    """Whether W is scaled before it is multiplied, not the sums of each group: less work where x has many rows."""
    splits: int = 1
    """Programs that share the blocks of one tile."""

    def __str__(self) -> str:
        scaled = "weights" if self.early else "sums"
        sizes = f"{self.rows}x{self.columns}, {self.warps} warps, {self.stages} stages, {self.splits} splits"
        return f"{sizes}, scaled {scaled}"

    def programs(self, problem: Problem, rows: int) -> int:
        """Tiles of the result."""
        return -(-problem.weight_rows // self.rows) * -(-rows // self.columns)

    def shared_memory(self, layout: Layout | CodeLayout) -> int:
        """Bytes that a program needs, as compiled: x stays in shared memory while it is multiplied."""
        words, x = self.rows * layout.span * 2, self.columns * layout.block * 2
        scales = self.rows * layout.groups * 4
        return (words + scales) * (self.stages - 1) + x * self.stages


class Multiplier:
    """Multiplies by packed weights on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._workspace = Workspace(device)
        self._dependent = dependent_launch(device)
        self._asm = self._knows_assembly()
        self._tiles: dict[tuple[object, ...], Tile | None] = {}

    def __call__(
        self,
        x: torch.Tensor,
        words: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout | CodeLayout,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """x: [rows, inputs] -> [rows, outputs], in x's type, added up in float32.

        words, scales: as the layout has them; gated: silu(gate) * up of their first and second half of outputs.
        """
        rows, inputs = x.shape
        key = (rows, words.shape[1], inputs, layout, gated)
        if key not in self._tiles:
            problem = Problem(gated=gated, weight_rows=words.shape[1], inputs=inputs, layout=layout)
            self._tiles[key] = choose(problem, rows, num_sms(self.device), shared_memory(self.device))
        tile = self._tiles[key]
        if tile is None:
            return self.by_library(x, words, scales, layout, bias, gated)
        return self.by_tiles(x, words, scales, layout, bias, gated, tile)

    def by_library(
        self,
        x: torch.Tensor,
        words: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout | CodeLayout,
        bias: torch.Tensor | None,
        gated: bool,
    ) -> torch.Tensor:
        """As the call, from unpacked weights."""
        y = F.linear(x, self.dequantize(words, scales, layout, x), bias)
        return silu_and_mul(y) if gated else y

    def by_tiles(
        self,
        x: torch.Tensor,
        words: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout | CodeLayout,
        bias: torch.Tensor | None,
        gated: bool,
        tile: Tile,
    ) -> torch.Tensor:
        """As the call, with a tile of one's own."""
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.shape[0]
        outputs = words.shape[1] // 2 if gated else words.shape[1]
        out = x.new_empty((rows, outputs))
        if rows:
            grid = (-(-words.shape[1] // tile.rows), tile.splits, -(-rows // tile.columns))
            tensors = (out, x, words, _as_read(scales, layout), words if bias is None else bias)
            scratch = (self._workspace.partials, self._workspace.arrivals)
            sizes = (rows, outputs, x.shape[1], *_strides(words, layout))
            constants = self._constants_of(tile, x, scales, layout, bias is not None, gated)
            weight_only.matmul_kernel[grid](*tensors, *scratch, *sizes, **constants)
        return out

    def compile(
        self,
        x: torch.Tensor,
        words: torch.Tensor,
        scales: torch.Tensor,
        layout: Layout | CodeLayout,
        gated: bool,
        tile: Tile,
    ) -> None:
        """What `by_tiles` without a bias would launch, in the threads of a triton.AsyncCompileMode if one is active."""
        tensors = (x, x, words, _as_read(scales, layout), words)
        scratch = (self._workspace.partials, self._workspace.arrivals)
        outputs = words.shape[1] // 2 if gated else words.shape[1]
        sizes = (x.shape[0], outputs, x.shape[1], *_strides(words, layout))
        constants = self._constants_of(tile, x, scales, layout, False, gated)
        weight_only.matmul_kernel.warmup(*tensors, *scratch, *sizes, grid=(1,), **constants)

    def dequantize(
        self, words: torch.Tensor, scales: torch.Tensor, layout: Layout | CodeLayout, x: torch.Tensor
    ) -> torch.Tensor:
        """The weights as a plain matrix for x, [outputs, x's columns] in its type.

        Memory is taken and given back at each call: the allocator hands the same to all layers, one after the other.
        """
        inputs, outputs = x.shape[1], words.shape[1]
        out = x.new_empty((outputs, inputs))
        weight_only.dequantize_kernel[(-(-outputs // UNPACK_ROWS), words.shape[0])](
            out,
            words,
            _as_read(scales, layout),
            outputs,
            inputs,
            *_strides(words, layout),
            **self._constants(layout, scales, x.dtype),
            TILE=UNPACK_ROWS,
            num_warps=4,
        )
        return out

    def gather(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """x: [rows, inputs] -> x[:, order]; order: [any number] int32."""
        x = x if x.is_contiguous() else x.contiguous()
        rows, inputs = x.shape
        count = len(order)
        out = torch.empty((rows, count), dtype=x.dtype, device=x.device)
        if rows:
            grid = (rows, -(-count // weight_only.GATHERED))
            weight_only.gather_kernel[grid](
                out, x, order, inputs, count, BLOCK=weight_only.GATHERED, num_warps=4, **self._dependent
            )
        return out

    def _constants_of(
        self, tile: Tile, x: torch.Tensor, scales: torch.Tensor, layout: Layout | CodeLayout, biased: bool, gated: bool
    ) -> dict[str, object]:
        return {
            **self._constants(layout, scales, x.dtype),
            "EVEN": x.shape[1] % layout.block == 0,
            "TILE": tile.rows,
            "COLUMNS": tile.columns,
            "STAGES": tile.stages,
            "EARLY": tile.early,
            "SPLIT": tile.splits > 1,
            "EPILOGUE": skinny.GATED.value if gated else skinny.PLAIN.value,
            "BIAS": biased,
            "num_warps": tile.warps,
        }

    def _constants(self, layout: Layout | CodeLayout, scales: torch.Tensor, dtype: torch.dtype) -> dict[str, object]:
        return {
            "BITS": layout.bits,
            "SPAN": layout.span,
            "GROUP": layout.group,
            "CODE": CODES[layout.code].value,
            "SCALES": SCALES[layout.scaled].value,
            "SCALE": SCALE_TYPES[scales.dtype],
            "POWER": layout.power(dtype),
            "ZEROS": layout.has_zeros(scales),
            "ASM": self._asm,
            **self._dependent,
        }

    def _knows_assembly(self) -> bool:
        """Whether the kernels' PTX is for this device: fma.bf16x2 is of compute capability 8.0."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(self.device) >= (8, 0)


def _as_read(scales: torch.Tensor, layout: Layout | CodeLayout) -> torch.Tensor:
    """Entries of groups are read as one number."""
    return scales.view(torch.int32) if layout.scaled == "groups" else scales


def _strides(words: torch.Tensor, layout: Layout | CodeLayout) -> tuple[int, int, int]:
    """From row to row and from block to block, in words; and the rows that share a scale of blocks."""
    return words.stride(1), words.stride(0), max(layout.scale_rows, 1)


TILES = {
    8: Tile(rows=128, columns=8, warps=4, stages=6),
    16: Tile(rows=128, columns=16, warps=4, stages=6),
    32: Tile(rows=64, columns=32, warps=4, stages=4),
    64: Tile(rows=64, columns=64, warps=4, stages=3),
    128: Tile(rows=128, columns=128, warps=8, stages=3),
}
"""By rows of x: the fastest, or nearly, of those that benchmarks/quant_kernels.py --tune tries, on an H200."""
TILE_OF_32_CODES = Tile(rows=64, columns=32, warps=2, stages=4)
"""For 32 rows and a CodeLayout."""
EARLY_COLUMNS = 128
"""From how many on scaling weights takes less time than scaling sums."""
BUSY_WARPS = 5
"""That a multiprocessor should have at least."""


def choose(problem: Problem, rows: int, sms: int, shared: int) -> Tile | None:
    """The tile for so many rows of x; None: unpack, and leave it to the library.

    sms: multiprocessors of the GPU; shared: bytes of shared memory that a program may have.
    """
    if rows > MOST_ROWS:
        return None
    wanted = next((size for size in COLUMNS if size >= rows), COLUMNS[-1])
    for columns in reversed([size for size in COLUMNS if size <= wanted]):
        codes = columns == TILE_OF_32_CODES.columns and problem.layout.scaled != "groups"
        tile = TILE_OF_32_CODES if codes else TILES[columns]
        early = problem.layout.scaled != "outputs" and columns >= EARLY_COLUMNS
        for stages in range(tile.stages, 1, -1):
            fitting = evolve(tile, stages=stages, early=early)
            if fitting.shared_memory(problem.layout) <= shared:
                return split(fitting, problem, rows, sms)
    return None


def split(tile: Tile, problem: Problem, rows: int, sms: int) -> Tile:
    """Blocks shared out so that all multiprocessors are busy, if that can be."""
    programs, splits = tile.programs(problem, rows), 1
    most = min(MOST_SPLITS, problem.blocks // 2)
    while programs * splits * tile.warps < sms * BUSY_WARPS and splits * 2 <= most and fits(tile, programs, splits * 2):
        splits *= 2
    return evolve(tile, splits=splits)


def fits(tile: Tile, programs: int, splits: int) -> bool:
    """Whether so many programs, each with so many splits, have room for their sums."""
    return programs <= MOST_PROGRAMS and programs * splits * tile.rows * tile.columns <= MOST_SUMS
