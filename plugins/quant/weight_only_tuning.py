"""The weight-only GEMM as an autotuned op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.autotune import AutotunedOp, Operands, version_of
from engine.ops.activation import act_and_mul
from engine.ops.common import fast_math, gluon_copies, gluon_tiles, launch, polling
from engine.ops.common.launch import has_wgmma, num_sms, shared_memory
from engine.ops.gemm import (
    few_rows,
    few_rows_tile,
    packed_layout,
    persistent_tile,
    persistent_w4a16,
    persistent_w4a16_launch,
    skinny,
    skinny_launch,
    specialized_w4a16,
    split_k_exchange,
    split_k_polling,
    stream_k,
    tile_order,
    unpack_weights,
    w4a16_few_rows,
    w4a16_fields,
    w4a16_parts,
    weight_only,
    weight_only_candidates,
    weight_only_launch,
    weight_only_tiles,
    weight_tile,
)
from engine.ops.gemm.packed_layout import PackedMatrix
from engine.ops.gemm.persistent_tile import PersistentTile
from engine.ops.gemm.weight_only_candidates import (
    MEASURED_CLASSES,
    PERSISTENT_CLASSES,
    candidates,
    even_splits,
    other_splits,
    prefetching,
)
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    MeasuredTile,
    WeightOnlyShape,
    WeightOnlyTile,
)


class WeightOnlyOp(AutotunedOp[MeasuredTile]):
    """Weight-only GEMM, with the activation of a gated layer. None: dequantize the matrix and multiply by cuBLAS.

    Operands' weights: PackedMatrix.tensors.
    """

    def __init__(self, matmul: WeightOnlyMatmul, shape: WeightOnlyShape, max_rows: int | None = None) -> None:
        """max_rows: maximum rows that the layer multiplies by this op. None: any number."""
        self.shape = shape
        self._matmul = matmul
        self._wgmma = has_wgmma(matmul.device)
        more = PERSISTENT_CLASSES if self._wgmma and PersistentTile.supports(shape) else ()
        self._row_classes = [rows for rows in (*MEASURED_CLASSES, *more) if max_rows is None or rows <= max_rows]

    @property
    def key(self) -> str:
        return f"weight-only {self.shape}"

    @property
    def version(self) -> str:
        return version_of(
            act_and_mul,
            fast_math,
            few_rows,
            few_rows_tile,
            gluon_copies,
            gluon_tiles,
            launch,
            packed_layout,
            persistent_tile,
            persistent_w4a16,
            persistent_w4a16_launch,
            polling,
            skinny,
            skinny_launch,
            specialized_w4a16,
            split_k_exchange,
            split_k_polling,
            stream_k,
            tile_order,
            unpack_weights,
            w4a16_few_rows,
            w4a16_fields,
            w4a16_parts,
            weight_only,
            weight_only_candidates,
            weight_only_launch,
            weight_only_tiles,
            weight_tile,
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

    def candidates(self, rows: int) -> Sequence[MeasuredTile]:
        device = self._matmul.device
        return candidates(self.shape, rows, num_sms(device), shared_memory(device), wgmma=self._wgmma)

    def refine(self, rows: int, ranked: Sequence[MeasuredTile]) -> Sequence[MeasuredTile]:
        """The fastest tile with other numbers of splits, and with prefetching, at its own and at even splits."""
        fastest = next((tile for tile in ranked if tile is not None), None)
        if not isinstance(fastest, WeightOnlyTile):
            return []
        even = even_splits(fastest, self.shape, rows, num_sms(self._matmul.device))
        ahead = [more for tile in (fastest, *even) for more in prefetching(tile, self.shape)]
        return list(dict.fromkeys([*other_splits(fastest, self.shape, rows), *even, *ahead]))

    def name(self, candidate: MeasuredTile) -> str:
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: MeasuredTile, operands: Operands) -> None:
        if candidate is not None:
            matrix = self._matrix(operands)
            x = torch.empty((rows, self.inputs), dtype=self.dtype, device=matrix.packed.device)
            self._matmul.compile(x, matrix, operands.bias, self.shape.gated, candidate, self.shape.activation)

    def run(self, candidate: MeasuredTile, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        matrix, gated, activation = self._matrix(operands), self.shape.gated, self.shape.activation
        if candidate is None:
            return self._matmul.dequantize_and_multiply(x, matrix, operands.bias, gated, activation)
        return self._matmul.multiply_by_tile(x, matrix, operands.bias, gated, candidate, activation)

    def choose(self, rows: int, candidate: MeasuredTile) -> None:
        self._matmul.choose(self.shape, rows, candidate)

    def _matrix(self, operands: Operands) -> PackedMatrix:
        return PackedMatrix(**operands.weights, layout=self.shape.layout)
