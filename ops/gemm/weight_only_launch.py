"""Launches of the weight-only kernels, with the tile chosen for each number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton.language as tl
from triton.experimental.gluon import language as gl

from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.common.launch import dependent_launch, has_wgmma, num_sms, shared_memory
from engine.ops.common.row_memory import empty_with_room
from engine.ops.gemm import (
    persistent_w4a16_launch,
    skinny,
    unpack_weights,
    w4a16_few_rows,
    w8a16_few_rows,
    weight_only,
    weight_only_vector,
)
from engine.ops.gemm.few_rows_tile import FewRowsTile
from engine.ops.gemm.packed_layout import PackedMatrix, W8Layout
from engine.ops.gemm.persistent_tile import PersistentTile, tile_for_rows
from engine.ops.gemm.persistent_w4a16_launch import StreamKWorkspace
from engine.ops.gemm.skinny_launch import Workspace, gated_epilogue
from engine.ops.gemm.weight_only_candidates import candidates
from engine.ops.gemm.weight_only_tiles import (
    ROW_CLASSES,
    GemmTile,
    Tile,
    WeightOnlyShape,
    WeightOnlyTile,
    WeightOnlyVectorTile,
    default_tile,
)

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

SCALE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
VALUE_TYPES = {"unsigned": unpack_weights.UNSIGNED, "signed": unpack_weights.SIGNED, "float8": unpack_weights.FLOAT8}
SCALE_LAYOUTS = {
    "groups": weight_only.GROUPS_OF_INPUTS,
    "outputs": weight_only.OUTPUTS,
    "blocks": weight_only.BLOCKS,
}
DEQUANTIZE_ROWS = 32
"""Outputs per program of the dequantize kernel."""
MIN_ROWS_WITH_ROOM = 129
"""From this many rows on, results of gated layers have room for whole tiles: the next layer has many inputs. 4096x14336
takes 42 us at 144 rows with room and 63 without, but 41 and 35 at 72, where a tile loads 56 rows too many (H200)."""


class WeightOnlyMatmul:
    """Weight-only GEMM on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.workspace = Workspace(device)
        """Also used by the W8A8 kernels of the same layers."""
        self._stream_k = StreamKWorkspace.on(device)
        self._dependent = dependent_launch(device)
        self._asm = self.workspace.supports_ptx
        self._chosen: dict[tuple[WeightOnlyShape, int], Tile] = {}
        self._tiles: dict[tuple[object, ...], Tile] = {}

    def choose(self, shape: WeightOnlyShape, rows: int, tile: Tile) -> None:
        """Use a tile for one of ROW_CLASSES from now on. None: dequantize the matrix and multiply by cuBLAS."""
        self._chosen[shape, rows] = tile
        self._tiles.clear()

    def tile(self, shape: WeightOnlyShape, rows: int) -> Tile:
        """The tile chosen for this many rows, else the default, or another that is predicted to be faster. None:
        dequantize and multiply by cuBLAS."""
        row_class = next((size for size in ROW_CLASSES if size >= rows), ROW_CLASSES[-1])
        limits, wgmma = (num_sms(self.device), shared_memory(self.device)), has_wgmma(self.device)
        measured: Sequence[Tile] = ()
        if (shape, row_class) in self._chosen:
            tile = self._chosen[shape, row_class]
            if isinstance(tile, PersistentTile):
                measured = candidates(shape, row_class, *limits, wgmma=wgmma)
        else:
            tile = default_tile(shape, rows, *limits, wgmma=wgmma)
        if isinstance(tile, PersistentTile):
            sizes = (shape.weight_rows, shape.blocks, rows, limits[0])
            tile = tile_for_rows(tile, *sizes, row_class=row_class, measured=measured)
        return tile

    def __call__(
        self,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        activation: str = "silu",
    ) -> torch.Tensor:
        """x W^T + bias: [rows, inputs] -> [rows, outputs], in x's dtype, accumulated in float32.

        gated: the result is act(gate) * up, of the first and second half of W's rows. activation: one of ACTIVATIONS.
        """
        rows, inputs = x.shape
        weight_rows, layout, zeros = matrix.rows, matrix.layout, matrix.zeros
        key = (rows, weight_rows, inputs, layout, gated, activation, x.dtype, zeros)
        if key not in self._tiles:
            shape = WeightOnlyShape(
                gated=gated,
                weight_rows=weight_rows,
                inputs=inputs,
                layout=layout,
                dtype=x.dtype,
                zeros=zeros,
                activation=activation,
            )
            self._tiles[key] = self.tile(shape, rows)
        tile = self._tiles[key]
        if tile is None:
            return self.dequantize_and_multiply(x, matrix, bias, gated, activation)
        return self.multiply_by_tile(x, matrix, bias, gated, tile, activation)

    def dequantize_and_multiply(
        self,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        gated: bool,
        activation: str = "silu",
    ) -> torch.Tensor:
        """As `__call__`, by dequantizing the matrix and multiplying by cuBLAS."""
        y = F.linear(x, self.dequantize(matrix, x), bias)
        return act_and_mul(y, activation) if gated else y

    def multiply_by_tile(
        self,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        gated: bool,
        tile: GemmTile,
        activation: str = "silu",
    ) -> torch.Tensor:
        """As `__call__`, by a given tile."""
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.shape[0]
        shape = (rows, _outputs(matrix, gated))
        out = empty_with_room(x, shape) if gated and rows >= MIN_ROWS_WITH_ROOM else x.new_empty(shape)
        if not rows:
            return out
        if isinstance(tile, PersistentTile):
            persistent_w4a16_launch.launch(
                out, x, matrix, bias, tile, self._stream_k, self.workspace.polled_sums, gated=gated,
                activation=activation,
            )  # fmt: skip
        else:
            kernel, arguments, constants = self._launch(out, x, matrix, bias, gated, tile, activation)
            kernel[tile.grid(matrix.rows, rows)](*arguments, **constants)
        return out

    def compile(
        self,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        gated: bool,
        tile: GemmTile,
        activation: str = "silu",
    ) -> None:
        """Compile what `multiply_by_tile` would launch, as the active triton.AsyncCompileMode says."""
        if isinstance(tile, PersistentTile):
            out = x.new_empty((x.shape[0], _outputs(matrix, gated)))
            persistent_w4a16_launch.launch(
                out, x, matrix, bias, tile, self._stream_k, self.workspace.polled_sums, gated=gated,
                activation=activation, compile_only=True,
            )  # fmt: skip
        else:
            kernel, arguments, constants = self._launch(x, x, matrix, bias, gated, tile, activation)
            kernel.warmup(*arguments, grid=(1,), **constants)

    def dequantize(self, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        """W as a plain matrix, [rows of W, x's columns], in x's dtype.

        The memory is allocated and freed at each call: the allocator reuses it for all layers.
        """
        inputs, outputs = x.shape[1], matrix.rows
        out = x.new_empty((outputs, inputs))
        weight_only.dequantize_kernel[(-(-outputs // DEQUANTIZE_ROWS), matrix.packed.shape[0])](
            out,
            matrix.packed,
            _as_read(matrix),
            outputs,
            inputs,
            *_strides(matrix),
            **self._constants(matrix, x.dtype),
            TILE=DEQUANTIZE_ROWS,
            num_warps=4,
        )
        return out

    def gather(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """x: [rows, inputs] -> x[:, order]. order: [any number] int32."""
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
        tile: WeightOnlyTile | WeightOnlyVectorTile | FewRowsTile,
        activation: str,
    ) -> tuple[JITFunction[Any], tuple[object, ...], dict[str, object]]:
        """A tile's kernel, its arguments and its constexprs."""
        if isinstance(tile, FewRowsTile):
            return self._launch_few_rows(out, x, matrix, bias, gated, tile, activation)
        rows, inputs = x.shape
        tensors = (out, x, matrix.packed, _as_read(matrix), matrix.packed if bias is None else bias)
        sizes = (rows, _outputs(matrix, gated), inputs, *_strides(matrix))
        constants = {
            **self._constants(matrix, x.dtype),
            "WHOLE_BLOCKS": inputs % matrix.layout.block == 0,
            "TILE": tile.rows,
            "EPILOGUE": gated_epilogue(activation) if gated else skinny.PLAIN.value,
            "BIAS": bias is not None,
            "num_warps": tile.warps,
        }
        if isinstance(tile, WeightOnlyVectorTile):
            return weight_only_vector.vector_kernel, (*tensors, *sizes), {**constants, "BLOCKS_PER_STEP": tile.blocks}
        constants |= {
            "COLUMNS": tile.columns,
            "PARTS": tile.parts(matrix.layout),
            "STAGES": tile.stages,
            "SCALE_WEIGHTS": tile.scales_weights,
            "SPLIT": tile.splits > 1,
            "POLLED": tile.polled(matrix.rows, rows, self.workspace),
            "AHEAD": tile.ahead,
        }
        scratch = (self.workspace.partials, self.workspace.arrivals, self.workspace.polled_sums)
        return weight_only.matmul_kernel, (*tensors, *scratch, *sizes), constants

    def _launch_few_rows(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        matrix: PackedMatrix,
        bias: torch.Tensor | None,
        gated: bool,
        tile: FewRowsTile,
        activation: str,
    ) -> tuple[JITFunction[Any], tuple[object, ...], dict[str, object]]:
        """As `_launch`, of the kernels for few rows."""
        rows, inputs = x.shape
        words = matrix.packed.view(torch.int32)
        layout = matrix.layout
        tensors = (out, x.view(torch.int32), words, _as_read(matrix), out if bias is None else bias)
        constants = {
            "TILE": tile.rows,
            "AHEAD": tile.ahead,
            "X_AHEAD": tile.x_ahead,
            "WHOLE_BLOCKS": inputs % layout.block == 0,
            "EPILOGUE": gated_epilogue(activation) if gated else skinny.PLAIN.value,
            "BIAS": bias is not None,
            "ROW_WARPS": tile.row_warps,
            "num_warps": tile.warps,
            "maxnreg": tile.registers,
            **self._dependent,
        }
        sizes = (rows, matrix.rows, inputs, len(words))
        if isinstance(layout, W8Layout):
            assert rows <= tile.columns, f"{rows} rows of x; at most {tile.columns}"
            constants |= {"IS_FLOAT8": layout.value_type == "float8", "SPLITS": tile.splits}
            return w8a16_few_rows.w8a16_few_rows_kernel, (*tensors, self.workspace.polled_sums, *sizes), constants
        constants |= {
            "COLUMNS": tile.columns,
            "SEVERAL": rows > tile.columns,
            "GROUPS": layout.groups,
            "SCALE_DTYPE": gl.float16 if matrix.scales.dtype == torch.float16 else gl.bfloat16,
            "POWER": layout.power(x.dtype),
            "ZERO_POINTS": matrix.zeros,
        }
        return w4a16_few_rows.w4a16_few_rows_kernel, (*tensors, *sizes), constants

    def _constants(self, matrix: PackedMatrix, dtype: torch.dtype) -> dict[str, object]:
        """Constexprs that follow from the matrix and x's dtype."""
        layout = matrix.layout
        return {
            "BITS": layout.bits,
            "SPAN": layout.span,
            "GROUP": layout.group,
            "VALUE_TYPE": VALUE_TYPES[layout.value_type].value,
            "SCALE_LAYOUT": SCALE_LAYOUTS[layout.scale_layout].value,
            "SCALE_DTYPE": SCALE_TYPES[matrix.scales.dtype],
            "POWER": layout.power(dtype),
            "ZERO_POINTS": matrix.zeros,
            "ASM": self._asm,
            **self._dependent,
        }


def _outputs(matrix: PackedMatrix, gated: bool) -> int:
    """Columns of the result."""
    return matrix.rows // 2 if gated else matrix.rows


def _as_read(matrix: PackedMatrix) -> torch.Tensor:
    """The scales as kernels read them: entries of groups as one int32."""
    return matrix.scales.view(torch.int32) if matrix.layout.scale_layout == "groups" else matrix.scales


def _strides(matrix: PackedMatrix) -> tuple[int, int, int]:
    """Row stride and block stride of `packed`, in words; and outputs per scale of blocks."""
    block_stride, row_stride, _ = matrix.packed.stride()
    return row_stride, block_stride, max(matrix.layout.scale_rows, 1)
