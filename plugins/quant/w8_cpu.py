"""W8 linear layers on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.core.layers import multiply, pack
from engine.plugins.quant.rounding import dequantize, quantize_rows
from engine.plugins.quant.w8_kernel import W8Kernel


class DequantizeAtLoadKernel(W8Kernel):
    """Weights dequantized to the model's dtype at load, rounded once; as fast and as large as unquantized weights.

    A CPU has no float8 arithmetic, and dequantizing at each call would take longer than the multiplication.
    """

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One matrix in the model's dtype."""
        merged = self.merge(loaded)
        scale = merged.scale if self.scale_rows else merged.scale[:, None]
        return {"weight": pack(dequantize(merged.weight, scale, self.compute_dtype, self.scale_rows))}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weights["weight"], bias)

    def describe(self) -> str:
        return f"weights dequantized to {self.spec.dtype} at load, activations not quantized"


class IntegerKernel(W8Kernel):
    """W8A8 of int8 weights and activations. The integer sums are exact."""

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Quantized weights and scales."""
        merged = self.merge(loaded)
        static = {} if merged.input_scale is None else {"input_scale": merged.input_scale}
        return {"weight": merged.weight, "scale": merged.scale, **static}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]), weights.get("input_scale"))
        y = torch._int_mm(quantized, weights["weight"].t()) * weights["scale"]
        y *= scale
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], weights["weight"].shape[0])

    def describe(self) -> str:
        return f"int8 products, activations quantized {self.activation_scales}"
