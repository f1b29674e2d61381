"""W8 linear layers on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from engine.core.layers import multiply, pack
from engine.core.quant import LinearSpec
from engine.plugins.quant.rounding import dequantize, quantize_rows
from engine.plugins.quant.w8_kernel import NONE, W8Format, W8Kernel


@cache
def products_are_exact() -> bool:
    """Whether torch._int_mm is exact on this CPU.

    On an x86 CPU, oneDNN shifts activations to unsigned numbers. Without VNNI its instructions add pairs of products in
    16 bits, which saturate: 2 * 255 * 127 > 2^15.
    """
    inputs = 64
    matrix = torch.full((16, inputs), 127, dtype=torch.int8)
    return bool((torch._int_mm(matrix, matrix.t()) == inputs * 127**2).all())


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
    """W8A8 of int8 weights and activations. The integer sums are exact.

    Where torch._int_mm is not, a weight w is split into w >> 1 and w & 1, whose pairs of products fit into 16 bits:
    2 * 255 * 64 < 2^15.
    """

    def __init__(self, spec: LinearSpec, form: W8Format) -> None:
        super().__init__(spec, form)
        self._splits = not products_are_exact()

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Quantized weights, [out, in] or split, [2 * out, in], and scales."""
        merged = self.merge(loaded)
        weight = torch.cat((merged.weight >> 1, merged.weight & 1)) if self._splits else merged.weight
        static = {} if merged.input_scale is None else {"input_scale": merged.input_scale}
        return {"weight": weight, "scale": merged.scale, **static}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]), weights.get("input_scale"))
        sums = torch._int_mm(quantized, weights["weight"].t())
        if self._splits:
            halves, bits = sums.chunk(2, 1)
            sums = bits.add_(halves, alpha=2)
        y = sums * weights["scale"]
        y *= scale
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[1])

    def describe(self) -> str:
        products = "int8 products of split weights" if self._splits else "int8 products"
        return f"{products}, activations quantized {self.activation_scales}"

    def slow(self) -> str | None:
        if not self._splits:
            return None
        return "this CPU has no exact int8 instructions (VNNI): weights are split and take twice the memory and time"


def cpu_kernel(spec: LinearSpec, form: W8Format) -> W8Kernel:
    """The kernel of a linear layer: integer products if both weights and activations are int8."""
    integers = form.dtype == "int8" and form.activations != NONE
    return IntegerKernel(spec, form) if integers else DequantizeAtLoadKernel(spec, form)
