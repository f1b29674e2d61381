"""The W8A8 GEMM as an autotuned op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.autotune import AutotunedOp, Operands, version_of
from engine.ops.activation import quantize_rows
from engine.ops.common import gluon_copies, gluon_tiles, launch
from engine.ops.gemm import (
    persistent_matmul,
    scaled_matmul,
    specialized_matmul,
    split_k,
    stream_k,
    tile_order,
    transposed_launch,
    transposed_matmul,
)
from engine.plugins.quant import w8a8_matmul, w8a8_shape, w8a8_tiles
from engine.plugins.quant.w8a8_matmul import W8A8Matmul
from engine.plugins.quant.w8a8_tiles import Tile


class W8A8Op(AutotunedOp[Tile]):
    """W8A8 GEMM including the quantization of x, which is the same for all candidates. None: torch's kernel.

    Operands' weights: as of W8A8Matmul. A gated layer's activation is left out.
    """

    def __init__(self, matmul: W8A8Matmul, *, static: bool) -> None:
        """static: whether activations have a stored scale."""
        self._matmul = matmul
        self._static = static

    @property
    def key(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self._matmul.weight_dtype, self.dtype)]
        scale = "a stored scale" if self._static else str(self._matmul.scaling)
        blocks = f" and blocks of {self._matmul.scale_rows} outputs" if self._matmul.scale_rows else ""
        return f"w8a8 {self._matmul.outputs}x{self.inputs} {names[0]}, {names[1]} with {scale}{blocks}"

    @property
    def version(self) -> str:
        kernels = (persistent_matmul, quantize_rows, scaled_matmul, specialized_matmul, split_k)
        shared = (gluon_copies, gluon_tiles, launch, stream_k, tile_order)
        return version_of(*shared, transposed_launch, transposed_matmul, w8a8_matmul, w8a8_shape, w8a8_tiles, *kernels)

    @property
    def inputs(self) -> int:
        return self._matmul.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self._matmul.dtype

    @property
    def row_classes(self) -> Sequence[int]:
        return self._matmul.row_classes

    def candidates(self, rows: int) -> Sequence[Tile]:
        return self._matmul.shape.candidates(rows)

    def name(self, candidate: Tile) -> str:
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: Tile, operands: Operands) -> None:
        if candidate is not None:
            self._matmul.compile(rows, operands.weights, operands.bias, candidate)

    def run(self, candidate: Tile, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        return self._matmul.multiply(x, operands.weights, operands.bias, candidate)

    def choose(self, rows: int, candidate: Tile) -> None:
        self._matmul.choose(rows, candidate)
