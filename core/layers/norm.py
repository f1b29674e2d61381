"""Root mean square normalisation (arXiv:1910.07467); the mean is taken in float32 or better."""

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
    """Norm over the hidden size, with the residual addition before it."""

    def __init__(self, name: str, size: int, eps: float, dtype: str) -> None:
        super().__init__(name, (size,), dtype)
        self.eps = eps

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and x + residual, the next residual; both [..., size]. Reduces a partial sum."""
        if isinstance(x, PartialSum):
            x = x.reduce()
        total = x if residual is None else x + residual
        return F.rms_norm(total, self.shape, self.weight, self.eps), total

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """The call's results, the norm as an input of `linear` alone: quantized where its kernel fuses that."""
        return self(x, residual)

    def into(
        self, following: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """`quantized_for` under its first name, for plugins that use it."""
        return self.quantized_for(following, x, residual)


class HeadNorm(Layer):
    """Norm over each head of queries and keys at once; all query heads share one weight, all key heads another."""

    weight: torch.Tensor
    """[heads, head_dim], laid out like the heads."""

    def __init__(self, parts: tuple[tuple[str, int], ...], head_dim: int, eps: float, dtype: str) -> None:
        """`parts`: (tensor's name, heads it is for), in the order of the heads."""
        self._parts = parts
        self._shape = (head_dim,)
        self.eps = eps
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim], the heads of all parts side by side."""
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight

    def tensors(self) -> Mapping[str, TensorSpec]:
        """One weight a part."""
        return {name: plain_tensor(self._shape, self._dtype) for name, _ in self._parts}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Lay the weights out by heads."""
        rows = [loaded[name].expand(heads, -1) for name, heads in self._parts]
        self.weight = torch.cat(rows).to(torch_dtype(self._dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as laid out."""
        return self.weight.nbytes if hasattr(self, "weight") else 0
