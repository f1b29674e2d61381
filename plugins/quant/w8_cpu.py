"""Linear layers with eight-bit weights on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.core.layers import multiply, pack
from engine.plugins.quant.rounding import dequantize, quantize_rows
from engine.plugins.quant.w8_kernel import W8Kernel


class DequantizeAtLoadKernel(W8Kernel):
    """Weights widened to the model's type once, at load: exact, as fast and as large as unquantized ones.

    A CPU has no arithmetic for float8, and widening at every multiplication would take longer than the multiplication.
    """

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One matrix in the model's type."""
        codes = self.merge(loaded)
        scale = codes.scale if self.scale_rows else codes.scale[:, None]
        return {"weight": pack(dequantize(codes.weight, scale, self.compute_dtype, self.scale_rows))}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]; activations are not quantized."""
        return multiply(x, weights["weight"], bias)

    def describe(self) -> str:
        """See W8Kernel."""
        return f"widened to {self.spec.dtype} at load, activations as they are"


class IntegerKernel(W8Kernel):
    """int8 codes of weights and activations multiplied as integers; sums are exact."""

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Codes and scales."""
        codes = self.merge(loaded)
        given = {} if codes.input_scale is None else {"input_scale": codes.input_scale}
        return {"weight": codes.weight, "scale": codes.scale, **given}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        codes, scale = quantize_rows(x.reshape(-1, x.shape[-1]), weights.get("input_scale"))
        y = torch._int_mm(codes, weights["weight"].t()) * weights["scale"]
        y *= scale
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], weights["weight"].shape[0])

    def describe(self) -> str:
        """See W8Kernel."""
        return "int8 products with a scale a token" if self.form.activations == "token" else "int8 products"
