"""The weight-only GEMM as an autotuned op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.autotune import AutotunedOp, Operands, version_of
from engine.ops.common import launch
from engine.ops.common.launch import num_sms, shared_memory
from engine.ops.gemm import packed_layout, skinny, skinny_launch, weight_only, weight_only_launch, weight_only_tiles
from engine.ops.gemm.packed_layout import PackedMatrix
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    MEASURED_CLASSES,
    WeightOnlyShape,
    WeightOnlyTile,
    candidates,
    other_splits,
)


class WeightOnlyOp(AutotunedOp[WeightOnlyTile | None]):
    """Weight-only GEMM, with the activation of a gated layer. None: dequantize the matrix and multiply by cuBLAS.

    Operands' weights: PackedMatrix.tensors.
    """

    def __init__(self, matmul: WeightOnlyMatmul, shape: WeightOnlyShape, max_rows: int = MEASURED_CLASSES[-1]) -> None:
        """max_rows: the layer multiplies more rows in another way."""
        self.shape = shape
        self._matmul = matmul
        self._row_classes = [rows for rows in MEASURED_CLASSES if rows <= max_rows]

    @property
    def key(self) -> str:
        return f"weight-only {self.shape}"

    @property
    def version(self) -> str:
        return version_of(
            launch, skinny, skinny_launch, weight_only, weight_only_launch, weight_only_tiles, packed_layout
        )

    @property
    def inputs(self) -> int:
        return self.shape.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def row_classes(self) -> Sequence[int]:
        return self._row_classes

    def candidates(self, rows: int) -> Sequence[WeightOnlyTile | None]:
        device = self._matmul.device
        return candidates(self.shape, rows, num_sms(device), shared_memory(device))

    def refine(self, rows: int, ranked: Sequence[WeightOnlyTile | None]) -> Sequence[WeightOnlyTile | None]:
        """Other numbers of splits of the fastest tile."""
        fastest = next((tile for tile in ranked if tile is not None), None)
        return [] if fastest is None else other_splits(fastest, self.shape, rows)

    def name(self, candidate: WeightOnlyTile | None) -> str:
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: WeightOnlyTile | None, operands: Operands) -> None:
        if candidate is not None:
            matrix = self._matrix(operands)
            x = torch.empty((rows, self.inputs), dtype=self.dtype, device=matrix.packed.device)
            self._matmul.compile(x, matrix, operands.bias, self.shape.gated, candidate, self.shape.activation)

    def run(self, candidate: WeightOnlyTile | None, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        matrix, gated, activation = self._matrix(operands), self.shape.gated, self.shape.activation
        if candidate is None:
            return self._matmul.dequantize_and_multiply(x, matrix, operands.bias, gated, activation)
        return self._matmul.multiply_by_tile(x, matrix, operands.bias, gated, candidate, activation)

    def choose(self, rows: int, candidate: WeightOnlyTile | None) -> None:
        self._matmul.choose(self.shape, rows, candidate)

    def _matrix(self, operands: Operands) -> PackedMatrix:
        return PackedMatrix(**operands.weights, layout=self.shape.layout)
