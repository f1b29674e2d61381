"""W8A8 GEMM of one layer, by our kernels or by torch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.core.quant import FLOAT8_CAPABILITY, Activation
from engine.ops.activation.quantize_rows import PER_ROW, Scaling, empty_quantized, quantize_rows
from engine.ops.common.launch import has_capability
from engine.ops.gemm.persistent_matmul import ALIGNMENT
from engine.ops.gemm.scaled_matmul import W8A8Tile, compile_matmul, gated_matmul, matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.transposed_launch import TransposedTile, transposed_matmul
from engine.plugins.quant.w8a8_shape import W8A8Shape, tile_for_rows
from engine.plugins.quant.w8a8_tiles import ONE_WAVE_ROWS, TRANSPOSED_ROWS, Tile

MAX_ROWS_SEPARATE = 512
"""Up to this many rows the activation of a gated layer has a kernel of its own, as smaller tiles are often faster."""
MAX_ROWS_SEPARATE_LIBRARY = 1024
"""The same where torch's kernel supports the GEMM."""
FAST_ACCUMULATION = True
"""Whether torch's float8 kernel may accumulate in the tensor cores only, at lower precision."""
INT8_CAPABILITY = (8, 0)
"""From this compute capability on, tensor cores multiply int8."""
BLOCK_MULTIPLE = 4
"""cuBLAS reads the scales of an output's blocks in steps of this many: there must be memory for whole steps."""


class W8A8Matmul:
    """W8A8 GEMM by one layer's weight, with the kernel chosen per number of rows."""

    def __init__(
        self,
        workspace: Workspace,
        weight_dtype: torch.dtype,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        *,
        scale_rows: int = 0,
        scaling: Scaling = PER_ROW,
    ) -> None:
        """weight_dtype: float8_e4m3fn or int8; outputs, inputs: rows and columns of W; dtype: of x before
        quantization.

        scale_rows: outputs per scale of a block of W; 0: each output has a scale. scaling: of x; per block if W's is.
        """
        self.weight_dtype = weight_dtype
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = dtype
        self.scale_rows = scale_rows
        self.scaling = scaling
        self.shape = shape = W8A8Shape.on(workspace.device, weight_dtype, outputs, inputs, dtype, scale_rows=scale_rows)
        self._has_gated = shape.persistent and outputs % (2 * ALIGNMENT) == 0
        self._one_wave = shape.one_wave
        self.row_classes = shape.row_classes
        """Row classes that are measured."""
        self._workspace = workspace
        self._chosen: dict[int, Tile] = {}

    def __call__(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """Quantize x and multiply: [rows, inputs], contiguous -> [rows, outputs], in x's dtype.

        weights: `weight` (in a W8Layout), `scale` ([outputs] float32, or [blocks of outputs, blocks of inputs]),
        `input_scale` ([1] float32) where activations have a stored scale, and what `library_weights` adds.
        """
        return self.multiply(x, weights, bias, self.tile(x.shape[0]))

    def tile(self, rows: int) -> Tile:
        """The tile chosen for this many rows, else the default, or another that fills waves better. None: torch's
        kernel."""
        if self._one_wave is not None and rows in ONE_WAVE_ROWS:
            return self._one_wave
        row_class = next((size for size in self.row_classes if size >= rows), self.row_classes[-1])
        if row_class not in self._chosen:
            return self.shape.default_tile(rows)
        return tile_for_rows(self.shape, self._chosen[row_class], rows, row_class)

    def library_weights(self, scale: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What torch's kernel needs besides W and `scale`: scales of blocks, padded to a BLOCK_MULTIPLE per output.

        scale: [blocks of outputs, blocks of inputs], contiguous; returned itself where no padding is needed. Empty
        where torch's kernel, or scales of blocks, are not used.
        """
        if not self.scale_rows or not self.shape.has_scaled_mm:
            return {}
        lacking = -scale.shape[1] % BLOCK_MULTIPLE
        return {"library_scale": F.pad(scale, (0, lacking)) if lacking else scale}

    def choose(self, rows: int, tile: Tile) -> None:
        """Use a tile for one of `row_classes` from now on. None: torch's kernel."""
        self._chosen[rows] = tile

    def multiply(
        self,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        tile: Tile,
    ) -> torch.Tensor:
        """As `__call__`, by a given tile."""
        quantized, x_scale = self._quantize(x, weights)
        return self.multiply_quantized(quantized, x_scale, weights, bias, tile)

    def multiply_quantized(
        self,
        quantized: torch.Tensor,
        x_scale: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        tile: Tile,
    ) -> torch.Tensor:
        """As `multiply`, of rows that are already quantized (quantize_rows)."""
        weight, scale = weights["weight"], weights["scale"]
        if isinstance(tile, TransposedTile):
            return transposed_matmul(quantized, x_scale, weight, scale, bias, self.dtype, tile, self._workspace)
        if tile is not None:
            return matmul(
                quantized,
                x_scale,
                weight,
                scale,
                bias,
                self.dtype,
                tile,
                self._workspace,
                scale_rows=self.scale_rows,
            )
        if self.scale_rows:
            return self._block_scaled_mm(quantized, x_scale, weights, bias)
        return torch._scaled_mm(
            quantized,
            weight.t(),
            scale_a=x_scale[:, None],
            scale_b=scale[None, :],
            bias=bias,
            out_dtype=self.dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )

    def gated(
        self,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """As `__call__`, then act(gate) * up of the halves of the outputs, in one kernel: [rows, outputs / 2]."""
        quantized, x_scale = self._quantize(x, weights)
        return self.multiply_gated(quantized, x_scale, weights, bias, activation)

    def multiply_gated(
        self,
        quantized: torch.Tensor,
        x_scale: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """As `gated`, of rows that are already quantized (quantize_rows)."""
        weight, scale = weights["weight"], weights["scale"]
        tile = self.tile(len(quantized))
        if isinstance(tile, TransposedTile):
            given = (quantized, x_scale, weight, scale, bias, self.dtype, tile, self._workspace)
            return transposed_matmul(*given, activation=activation)
        return gated_matmul(quantized, x_scale, weight, scale, bias, self.dtype, activation)

    def _quantize(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of x as the layer multiplies them, and their scales."""
        return quantize_rows(x, weights["weight"].dtype, scale=weights.get("input_scale"), scaling=self.scaling)

    def fuses_gating(self, rows: int) -> bool:
        """Whether `gated` is possible, and faster than `__call__` and the activation after it."""
        if not self._has_gated:
            return False
        most = MAX_ROWS_SEPARATE_LIBRARY if self.shape.has_scaled_mm else MAX_ROWS_SEPARATE
        return rows > most or (rows in TRANSPOSED_ROWS and isinstance(self.tile(rows), TransposedTile))

    def _block_scaled_mm(
        self,
        quantized: torch.Tensor,
        x_scale: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply by torch's kernel for scales of 1 x 128 and 128 x 128 blocks.

        x_scale: [blocks, rows rounded up]. The kernel reads as many rows of x as there are scales.
        """
        rows = quantized.shape[0]
        all_rows = quantized.as_strided((x_scale.shape[1], quantized.shape[1]), quantized.stride())
        y = F.scaled_mm(
            all_rows,
            weights["weight"].t(),
            x_scale.t(),
            F.ScalingType.BlockWise1x128,
            weights["library_scale"].t(),
            F.ScalingType.BlockWise128x128,
            output_dtype=self.dtype,
        )[:rows]
        return y if bias is None else y + bias

    def compile(
        self,
        rows: int,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        tile: W8A8Tile | TransposedTile,
    ) -> None:
        """Compile what `multiply` would launch, as the active triton.AsyncCompileMode says."""
        weight, scale = weights["weight"], weights["scale"]
        per_block = self.scaling.per_block
        quantized, x_scale = empty_quantized(rows, self.inputs, weight.dtype, weight.device, per_block=per_block)
        if isinstance(tile, TransposedTile):
            given = (quantized, x_scale, weight, scale, bias, self.dtype, tile, self._workspace)
            transposed_matmul(*given, compile_only=True)
            return
        compile_matmul(
            quantized, x_scale, weight, scale, bias, self.dtype, tile, self._workspace, scale_rows=self.scale_rows
        )


def has_tensor_cores_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU multiplies quantized values of a dtype on tensor cores, by the kernels here. True for a CPU, where
    the interpreter runs the kernels."""
    minimum = INT8_CAPABILITY if dtype == torch.int8 else FLOAT8_CAPABILITY
    return device.type == "cpu" or has_capability(device, minimum)
