"""Norms: root mean square norms (arXiv:1910.07467) and layer norms; means are taken in float32 or better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from engine.core.distributed.partial_sum import PartialSum
from engine.core.distributed.scattered_rows import whole_rows
from engine.core.layers.base import Layer, TensorLayer, plain_tensor, torch_dtype
from engine.core.quant.base import TensorSpec

if TYPE_CHECKING:
    from engine.core.layers.linear import Linear, TensorOrQuantized

NormKind = Literal["rms", "rms_unit_offset", "layer", "layer_bias"]
"""rms: root mean square norm. rms_unit_offset: the same, with weights that are stored minus 1. layer: layer norm
without bias. layer_bias: layer norm with bias."""


class RMSNorm(TensorLayer):
    """Norm over the hidden size, after the residual addition."""

    def __init__(self, name: str, size: int, eps: float, dtype: str, *, unit_offset: bool = False) -> None:
        """unit_offset: the checkpoint has the weight minus 1."""
        super().__init__(name, (size,), dtype)
        self.eps = eps
        self.unit_offset = unit_offset
        """Whether `weight` is in float32: 1 plus a small number would be rounded in 16 bits."""

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        if self.unit_offset:
            self.weight = 1.0 + loaded[self.name].float()
        else:
            super().fill(loaded)

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and x + residual itself, the next residual; both [..., size].

        x, residual: [..., size]. A partial sum x is reduced first. residual: None counts as zeros.
        """
        total = _add(x, residual)
        if self.unit_offset:
            return F.rms_norm(total.float(), self.shape, self.weight, self.eps).to(total.dtype), total
        return F.rms_norm(total, self.shape, self.weight, self.eps), total

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """As the call, with the norm as input for `linear` alone: quantized where both kernels can fuse that."""
        return self(x, residual)

    def with_logits(
        self, router: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the call, and the result of `router` for the norm: in one kernel where the layers can fuse that."""
        normed, residual = self(x, residual)
        return normed, residual, router(normed)

    def into(
        self, following: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """The former name of `quantized_for`, kept for older plugins."""
        return self.quantized_for(following, x, residual)


class LayerNorm(Layer):
    """Layer norm over the hidden size, after the residual addition; called as an RMSNorm."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __init__(self, name: str, size: int, eps: float, dtype: str, *, bias: bool) -> None:
        """name: of the module in the checkpoint."""
        self._names = (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
        self._shape = (size,)
        self.eps = eps
        self._dtype = dtype

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: plain_tensor(self._shape, self._dtype) for name in self._names}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self.weight, *bias = (loaded[name].to(torch_dtype(self._dtype)) for name in self._names)
        self.bias = bias[0] if bias else None

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As RMSNorm."""
        total = _add(x, residual)
        return F.layer_norm(total, self._shape, self.weight, self.bias, self.eps), total

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """As RMSNorm; never quantized."""
        return self(x, residual)

    @property
    def nbytes(self) -> int:
        if not hasattr(self, "weight"):
            return 0
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ResidualAddition:
    """The residual addition alone, in place of a sublayer's input norm; called as an RMSNorm."""

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + residual, twice. A partial sum x is reduced first."""
        total = _add(x, residual)
        return total, total

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """As the call."""
        return self(x, residual)


def _add(x: torch.Tensor | PartialSum, residual: torch.Tensor | None) -> torch.Tensor:
    """x + residual. A partial sum x is reduced first; residual: None counts as zeros."""
    if isinstance(x, PartialSum):
        x = x.reduce()
    residual = whole_rows(residual)
    return x if residual is None else x + residual


Norm = RMSNorm | LayerNorm
"""A norm over the hidden size."""
