"""How multiplications of quantized activations by eight-bit codes are measured (engine.core.autotune.op)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.autotune import AutotunedOp, Operands, version_of
from engine.ops.activation import quantize_rows
from engine.ops.common import launch
from engine.ops.gemm import persistent_matmul, scaled_matmul, split_k as split_sums, tile_order
from engine.ops.gemm.scaled_matmul import MatmulTile
from engine.plugins.quant import w8a8_matmul as eight_bit_codes
from engine.plugins.quant.w8a8_matmul import ROW_CLASSES, W8A8Matmul


class ByCodes(AutotunedOp[MatmulTile | None]):
    """A multiplication of rows that are quantized first, as all candidates do alike. None: torch's kernel.

    Weights of its operands: as a W8A8Matmul has them.
    """

    def __init__(self, multiplier: W8A8Matmul, *, static: bool) -> None:
        """static: whether activations have a stored scale."""
        self._multiplier = multiplier
        self._static = static

    @property
    def key(self) -> str:
        """See AutotunedOp."""
        names = [str(dtype).removeprefix("torch.") for dtype in (self._multiplier.weight_dtype, self.dtype)]
        scale = "a stored scale" if self._static else "a scale a row"
        return f"codes {self._multiplier.outputs}x{self.inputs} {names[0]}, {names[1]} with {scale}"

    @property
    def version(self) -> str:
        """See AutotunedOp."""
        return version_of(
            launch, quantize_rows, scaled_matmul, persistent_matmul, split_sums, tile_order, eight_bit_codes
        )

    @property
    def inputs(self) -> int:
        """See AutotunedOp."""
        return self._multiplier.inputs

    @property
    def dtype(self) -> torch.dtype:
        """See AutotunedOp."""
        return self._multiplier.dtype

    @property
    def row_classes(self) -> Sequence[int]:
        """See AutotunedOp."""
        return ROW_CLASSES

    def candidates(self, rows: int) -> Sequence[MatmulTile | None]:
        """What is taken unmeasured first."""
        return self._multiplier.candidates(rows)

    def name(self, candidate: MatmulTile | None) -> str:
        """See AutotunedOp."""
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: MatmulTile | None, operands: Operands) -> None:
        """See AutotunedOp."""
        if candidate is not None:
            self._multiplier.compile(rows, operands.weights, operands.bias, candidate)

    def run(self, candidate: MatmulTile | None, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """See AutotunedOp; not activated where the layer is gated."""
        return self._multiplier.multiply(x, operands.weights, operands.bias, candidate)

    def choose(self, rows: int, candidate: MatmulTile | None) -> None:
        """See AutotunedOp."""
        self._multiplier.choose(rows, candidate)
