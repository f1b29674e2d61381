"""Root mean square norms (arXiv:1910.07467); the mean is taken in float32 or better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.core.distributed.partial_sum import PartialSum
from engine.core.layers.base import Layer, TensorLayer, plain_tensor, torch_dtype
from engine.core.quant.base import TensorSpec

if TYPE_CHECKING:
    from engine.core.layers.linear import Linear, TensorOrQuantized


class RMSNorm(TensorLayer):
    """Norm over the hidden size, after the residual addition."""

    def __init__(self, name: str, size: int, eps: float, dtype: str) -> None:
        super().__init__(name, (size,), dtype)
        self.eps = eps

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and x + residual itself, the next residual; both [..., size].

        x, residual: [..., size]. A partial sum x is reduced first. residual: None counts as zeros.
        """
        if isinstance(x, PartialSum):
            x = x.reduce()
        total = x if residual is None else x + residual
        return F.rms_norm(total, self.shape, self.weight, self.eps), total

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """The same two results, the norm for `linear` alone: quantized where both kernels allow to fuse that."""
        return self(x, residual)

    def into(
        self, following: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """The former name of `quantized_for`, kept for older plugins."""
        return self.quantized_for(following, x, residual)


class HeadNorm(Layer):
    """Norm over each head of queries and keys in one call; query heads share one weight, key heads another."""

    weight: torch.Tensor
    """[heads, head_dim], in the order of the heads."""

    def __init__(self, parts: tuple[tuple[str, int], ...], head_dim: int, eps: float, dtype: str) -> None:
        """parts: (tensor's name, number of heads that it is for), in the order of the heads."""
        self._parts = parts
        self._shape = (head_dim,)
        self.eps = eps
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim], the heads of all parts concatenated -> the same shape."""
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: plain_tensor(self._shape, self._dtype) for name, _ in self._parts}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        rows = [loaded[name].expand(heads, -1) for name, heads in self._parts]
        self.weight = torch.cat(rows).to(torch_dtype(self._dtype))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes if hasattr(self, "weight") else 0
