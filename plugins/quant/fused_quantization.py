"""Fused input quantization of the W8A8 kernels: norm or activation and quantization in one Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine.core.quant import ACTIVATIONS, Activation, FusedInputQuantization, QuantizedActivation
from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import BLOCK
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize
from engine.plugins.quant.w8a8_matmul import W8A8Matmul

SCALE_BYTES = 4
"""Bytes of a row's scale."""


class QuantizedRows(QuantizedActivation):
    """Rows quantized by quantize_rows or a kernel with the same result."""

    __slots__ = ("scales", "values")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """values: [rows, inputs padded to a multiple of 128], float8 or int8; scales: as quantize_rows returns them."""
        self.values = values
        self.scales = scales


class NormAndActivationQuantization(FusedInputQuantization):
    """Quantizes in the norm or activation kernel. Results equal those of two kernels, bit for bit."""

    activations = ACTIVATIONS
    reads_float32_norm_weight = True

    def __init__(
        self,
        matmul: W8A8Matmul,
        supports_rows: Callable[[int], bool],
        input_activation: Activation = "silu",
        activation: Activation = "silu",
    ) -> None:
        """matmul: the layer's; supports_rows: whether the layer multiplies this many rows by it; the activations: as of
        the layer's spec."""
        self._matmul = matmul
        self._supports_rows = supports_rows
        self._input_activation = input_activation
        self._activation = activation

    @property
    def has_row_tensors(self) -> bool:
        # Scales per block are stored by block. Padded values and a scale take more memory than a short row in 16 bits.
        inputs = self._matmul.inputs
        row_bytes = -(-inputs // BLOCK) * BLOCK + SCALE_BYTES
        return not self._matmul.scaling.per_block and row_bytes <= 2 * inputs

    def row_tensors(self, made: QuantizedActivation) -> Sequence[torch.Tensor]:
        rows = _rows(made)
        return rows.values, rows.scales

    def from_row_tensors(self, tensors: Sequence[torch.Tensor]) -> QuantizedRows:
        return QuantizedRows(*tensors)

    def supports_rows(self, rows: int) -> bool:
        return self._supports_rows(rows)

    def norm_and_quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
        others: Sequence[torch.Tensor] = (),
    ) -> tuple[QuantizedRows, torch.Tensor]:
        matmul, scale = self._matmul, weights.get("input_scale")
        values, scales, total = add_rms_norm_quantize(
            x, residual, norm_weight, eps, matmul.weight_dtype, scale=scale, scaling=matmul.scaling, others=others
        )
        return QuantizedRows(values, scales), total

    def sum_norm_and_quantize(
        self,
        addends: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[QuantizedRows, torch.Tensor]:
        x, *others = addends
        return self.norm_and_quantize(x, residual, norm_weight, eps, weights, others)

    def activate_and_quantize(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> QuantizedRows:
        matmul, scale = self._matmul, weights.get("input_scale")
        values, scales = act_and_mul_quantize(
            x, matmul.weight_dtype, self._input_activation, scale=scale, scaling=matmul.scaling
        )
        return QuantizedRows(values, scales)

    def apply(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply. Raises TypeError for an activation that another kernel's object quantized."""
        rows = _rows(made)
        tile = self._matmul.tile(len(rows.values))
        return self._matmul.multiply_quantized(rows.values, rows.scales, weights, bias, tile)

    def fuses_quantized_gating(self, made: QuantizedActivation) -> bool:
        return self._matmul.fuses_gating(len(_rows(made).values))

    def apply_quantized_gated(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = _rows(made)
        return self._matmul.multiply_gated(rows.values, rows.scales, weights, bias, self._activation)


def _rows(made: QuantizedActivation) -> QuantizedRows:
    if not isinstance(made, QuantizedRows):
        raise TypeError(f"{type(made).__name__} was made for another kernel; this one takes QuantizedRows")
    return made
