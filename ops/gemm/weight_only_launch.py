"""Launches of the weight-only kernels, by the tiles that are chosen for each number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton.language as tl

from engine.ops.activation.silu_and_mul import silu_and_mul
from engine.ops.common.launch import dependent_launch, num_sms, shared_memory
from engine.ops.gemm import skinny, weight_only, weight_only_vector
from engine.ops.gemm.packed_layout import PackedMatrix
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.weight_only_tiles import ROW_CLASSES, GemmShape, Tile, VectorTile, choose

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

SCALE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
CODES = {"unsigned": weight_only.UNSIGNED, "signed": weight_only.SIGNED, "float8": weight_only.FLOAT8}
SCALES = {
    "groups": weight_only.GROUPS_OF_INPUTS,
    "outputs": weight_only.OUTPUTS,
    "blocks": weight_only.BLOCKS,
}
UNPACK_ROWS = 32
"""Outputs that a program unpacks."""


class Multiplier:
    """Multiplies by packed weights on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.workspace = Workspace(device)
        """For other kernels of the same layers, too."""
        self._dependent = dependent_launch(device)
        self._asm = self._knows_assembly()
        self._chosen: dict[tuple[GemmShape, int], Tile | VectorTile | None] = {}
        self._tiles: dict[tuple[object, ...], Tile | VectorTile | None] = {}

    def choose(self, problem: GemmShape, rows: int, tile: Tile | VectorTile | None) -> None:
        """From now on multiply by this tile where x has so many rows, of ROW_CLASSES, or fewer, down to the class
        before; None: by the library."""
        self._chosen[problem, rows] = tile
        self._tiles.clear()

    def tile(self, problem: GemmShape, rows: int) -> Tile | VectorTile | None:
        """What was chosen for so many rows, else what `choose` says."""
        last = next((most for most in ROW_CLASSES if most >= rows), rows)
        if (problem, last) in self._chosen:
            return self._chosen[problem, last]
        return choose(problem, rows, num_sms(self.device), shared_memory(self.device))

    def __call__(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        """x: [rows, inputs] -> [rows, outputs], in x's type, added up in float32.

        gated: silu(gate) * up, the first and the second half of W's rows.
        """
        rows, inputs = x.shape
        weight_rows, layout, zeros = matrix.rows, matrix.layout, matrix.zeros
        key = (rows, weight_rows, inputs, layout, gated, x.dtype, zeros)
        if key not in self._tiles:
            problem = GemmShape(
                gated=gated, weight_rows=weight_rows, inputs=inputs, layout=layout, dtype=x.dtype, zeros=zeros
            )
            self._tiles[key] = self.tile(problem, rows)
        tile = self._tiles[key]
        if tile is None:
            return self.by_library(x, matrix, bias, gated)
        return self.by_tiles(x, matrix, bias, gated, tile)

    def by_library(self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
        """As the call, from unpacked weights."""
        y = F.linear(x, self.dequantize(matrix, x), bias)
        return silu_and_mul(y) if gated else y

    def by_tiles(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, gated: bool, tile: Tile | VectorTile
    ) -> torch.Tensor:
        """As the call, with a tile of one's own."""
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, _outputs(matrix, gated)))
        if rows:
            kernel, arguments, constants = self._launch(out, x, matrix, bias, gated, tile)
            kernel[tile.grid(matrix.rows, rows)](*arguments, **constants)
        return out

    def compile(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, gated: bool, tile: Tile | VectorTile
    ) -> None:
        """What `by_tiles` would launch, in the threads of a triton.AsyncCompileMode if one is active."""
        kernel, arguments, constants = self._launch(x, x, matrix, bias, gated, tile)
        kernel.warmup(*arguments, grid=(1,), **constants)

    def dequantize(self, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        """W as a plain matrix for x, [rows of W, x's columns] in its type.

        Memory is taken and given back at each call: the allocator hands the same to all layers, one after the other.
        """
        inputs, outputs = x.shape[1], matrix.rows
        out = x.new_empty((outputs, inputs))
        weight_only.dequantize_kernel[(-(-outputs // UNPACK_ROWS), matrix.words.shape[0])](
            out,
            matrix.words,
            _as_read(matrix),
            outputs,
            inputs,
            *_strides(matrix),
            **self._constants(matrix, x.dtype),
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

    def _launch(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        gated: bool,
        tile: Tile | VectorTile,
    ) -> tuple[JITFunction[Any], tuple[object, ...], dict[str, object]]:
        """A tile's kernel, its arguments and its constants."""
        rows, inputs = x.shape
        tensors = (out, x, matrix.words, _as_read(matrix), matrix.words if bias is None else bias)
        sizes = (rows, _outputs(matrix, gated), inputs, *_strides(matrix))
        constants = {
            **self._constants(matrix, x.dtype),
            "EVEN": inputs % matrix.layout.block == 0,
            "TILE": tile.rows,
            "EPILOGUE": skinny.GATED.value if gated else skinny.PLAIN.value,
            "BIAS": bias is not None,
            "num_warps": tile.warps,
        }
        if isinstance(tile, VectorTile):
            return weight_only_vector.vector_kernel, (*tensors, *sizes), {**constants, "AT_ONCE": tile.blocks}
        constants |= {
            "COLUMNS": tile.columns,
            "PARTS": tile.parts(matrix.layout),
            "STAGES": tile.stages,
            "EARLY": tile.early,
            "SPLIT": tile.splits > 1,
        }
        scratch = (self.workspace.partials, self.workspace.arrivals)
        return weight_only.matmul_kernel, (*tensors, *scratch, *sizes), constants

    def _constants(self, matrix: PackedMatrix, dtype: torch.dtype) -> dict[str, object]:
        """Those that follow from the matrix and from x's type."""
        layout = matrix.layout
        return {
            "BITS": layout.bits,
            "SPAN": layout.span,
            "GROUP": layout.group,
            "CODE": CODES[layout.code].value,
            "SCALES": SCALES[layout.scaled].value,
            "SCALE": SCALE_TYPES[matrix.scales.dtype],
            "POWER": layout.power(dtype),
            "ZEROS": matrix.zeros,
            "ASM": self._asm,
            **self._dependent,
        }

    def _knows_assembly(self) -> bool:
        """Whether the kernels' PTX is for this device: fma.bf16x2 is of compute capability 8.0."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(self.device) >= (8, 0)


def _outputs(matrix: PackedMatrix, gated: bool) -> int:
    """Columns of the result."""
    return matrix.rows // 2 if gated else matrix.rows


def _as_read(matrix: PackedMatrix) -> torch.Tensor:
    """Scales; entries of groups are read as one number."""
    return matrix.scales.view(torch.int32) if matrix.layout.scaled == "groups" else matrix.scales


def _strides(matrix: PackedMatrix) -> tuple[int, int, int]:
    """From row to row and from block to block, in words; and the rows that share a scale of blocks."""
    block_stride, row_stride, _ = matrix.words.stride()
    return row_stride, block_stride, max(matrix.layout.scale_rows, 1)
