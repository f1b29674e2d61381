"""How multiplications by packed weights are measured (engine.core.autotune.op)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.autotune import AutotunedOp, Operands, version_of
from engine.ops.common import launch
from engine.ops.common.launch import num_sms, shared_memory
from engine.ops.gemm import (
    packed_layout as layout,
    skinny,
    skinny_launch,
    weight_only,
    weight_only_launch,
    weight_only_tiles,
)
from engine.ops.gemm.packed_layout import PackedMatrix
from engine.ops.gemm.weight_only_launch import Multiplier
from engine.ops.gemm.weight_only_tiles import MEASURED_CLASSES, GemmShape, Tile, candidates, other_splits


class WeightOnly(AutotunedOp[Tile | None]):
    """A multiplication by packed weights. None: by the library. Weights of its operands: PackedMatrix.tensors."""

    def __init__(self, multiplier: Multiplier, problem: GemmShape, most_rows: int = MEASURED_CLASSES[-1]) -> None:
        """most_rows: more are multiplied in another way."""
        self.problem = problem
        self._multiplier = multiplier
        self._classes = [rows for rows in MEASURED_CLASSES if rows <= most_rows]

    @property
    def key(self) -> str:
        """See AutotunedOp."""
        return f"weight-only {self.problem}"

    @property
    def version(self) -> str:
        """See AutotunedOp."""
        return version_of(launch, skinny, skinny_launch, weight_only, weight_only_launch, weight_only_tiles, layout)

    @property
    def inputs(self) -> int:
        """See AutotunedOp."""
        return self.problem.inputs

    @property
    def dtype(self) -> torch.dtype:
        """See AutotunedOp."""
        return self.problem.dtype

    @property
    def row_classes(self) -> Sequence[int]:
        """See AutotunedOp."""
        return self._classes

    def candidates(self, rows: int) -> Sequence[Tile | None]:
        """The tile that is taken unmeasured first."""
        device = self._multiplier.device
        return candidates(self.problem, rows, num_sms(device), shared_memory(device))

    def refine(self, rows: int, ranked: Sequence[Tile | None]) -> Sequence[Tile | None]:
        """Other numbers of splits of the fastest tile."""
        fastest = next((tile for tile in ranked if tile is not None), None)
        return [] if fastest is None else other_splits(fastest, self.problem, rows)

    def name(self, candidate: Tile | None) -> str:
        """See AutotunedOp."""
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: Tile | None, operands: Operands) -> None:
        """See AutotunedOp."""
        if candidate is not None:
            matrix = self._matrix(operands)
            x = torch.empty((rows, self.inputs), dtype=self.dtype, device=matrix.words.device)
            self._multiplier.compile(x, matrix, operands.bias, self.problem.gated, candidate)

    def run(self, candidate: Tile | None, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """See AutotunedOp."""
        matrix, gated = self._matrix(operands), self.problem.gated
        if candidate is None:
            return self._multiplier.by_library(x, matrix, operands.bias, gated)
        return self._multiplier.by_tiles(x, matrix, operands.bias, gated, candidate)

    def choose(self, rows: int, candidate: Tile | None) -> None:
        """See AutotunedOp."""
        self._multiplier.choose(self.problem, rows, candidate)

    def _matrix(self, operands: Operands) -> PackedMatrix:
        return PackedMatrix(**operands.weights, layout=self.problem.layout)
