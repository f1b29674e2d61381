"""Activations quantized by the kernels that make them, for a multiplication by eight-bit codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.core.quant import FusedInputQuantization, QuantizedActivation
from engine.ops.activation.silu_and_mul_quantize import silu_and_mul_quantize
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize
from engine.plugins.quant.w8a8_matmul import W8A8Matmul


class CodedRows(QuantizedActivation):
    """Rows as quantize_rows leaves them."""

    __slots__ = ("codes", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes: [rows, inputs padded to a multiple of 128]; scales: [rows] float32."""
        self.codes = codes
        self.scales = scales


class NormAndActivationQuantization(FusedInputQuantization):
    """Norm or activation and quantization in one kernel. Codes are those of two kernels one after the other."""

    def __init__(self, multiplier: W8A8Matmul, takes: Callable[[int], bool]) -> None:
        """multiplier: the layer's; takes: whether it is what multiplies so many rows."""
        self._multiplier = multiplier
        self._takes = takes

    def takes(self, rows: int) -> bool:
        """See FusedInputQuantization."""
        return self._takes(rows)

    def normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[CodedRows, torch.Tensor]:
        """See FusedInputQuantization; `residual` is overwritten."""
        dtype, scale = self._multiplier.codes, weights.get("input_scale")
        codes, scales, total = add_rms_norm_quantize(x, residual, norm_weight, eps, dtype, scale=scale)
        return CodedRows(codes, scales), total

    def activated(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> CodedRows:
        """See FusedInputQuantization."""
        return CodedRows(*silu_and_mul_quantize(x, self._multiplier.codes, scale=weights.get("input_scale")))

    def apply(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See FusedInputQuantization. Raises TypeError for what another kernel made."""
        if not isinstance(made, CodedRows):
            raise TypeError(f"{type(made).__name__} was made for another kernel; this one takes rows of codes")
        tile = self._multiplier.tile(len(made.codes))
        return self._multiplier.multiply_codes(made.codes, made.scales, weights, bias, tile)
