"""Norms of queries and keys before the rotary embedding: over each head, or over all heads of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from attrs import evolve, frozen

from engine.core.distributed.rank_group import RankGroup
from engine.core.layers.base import Layer, plain_tensor, torch_dtype
from engine.core.quant.base import TensorSpec


class HeadNorm(Layer):
    """Norm over each head of queries and keys in one call; query heads share one weight, key heads another."""

    weight: torch.Tensor
    """[heads, head_dim], in the order of the heads; in float32 if `unit_offset`."""

    def __init__(
        self,
        parts: tuple[tuple[str, int], ...],
        head_dim: int,
        eps: float,
        dtype: str,
        *,
        unit_offset: bool = False,
    ) -> None:
        """parts: (tensor's name, number of heads that it is for), in the order of the heads. unit_offset: the
        checkpoint has the weights minus 1.
        """
        self._parts = parts
        self._shape = (head_dim,)
        self.eps = eps
        self.unit_offset = unit_offset
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim], the heads of all parts concatenated -> the same shape."""
        if self.unit_offset:
            return (F.rms_norm(x.float(), self._shape, None, self.eps) * self.weight).to(x.dtype)
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: plain_tensor(self._shape, self._dtype) for name, _ in self._parts}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        rows = [loaded[name].expand(heads, -1) for name, heads in self._parts]
        weight = torch.cat(rows)
        self.weight = 1.0 + weight.float() if self.unit_offset else weight.to(torch_dtype(self._dtype))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes if hasattr(self, "weight") else 0


@frozen(kw_only=True)
class ProjectionPart:
    """The queries or the keys: what one ProjectionNorm's mean is taken over."""

    name: str
    """Name of the weight's tensor."""
    heads: int
    """Heads of this rank."""
    total_heads: int
    """Heads of all ranks."""
    replicas: int = 1
    """Number of adjacent ranks that hold the same heads."""


class ProjectionNorm(Layer):
    """Norm over all heads of the queries together, and over all heads of the keys, of all ranks."""

    weight: torch.Tensor
    """[heads, head_dim] of this rank, in the order of the heads."""

    def __init__(
        self, parts: Sequence[ProjectionPart], head_dim: int, eps: float, dtype: str, group: RankGroup
    ) -> None:
        """parts: in the order of the heads."""
        self._parts = tuple(parts)
        self._head_dim = head_dim
        self.eps = eps
        self._dtype = dtype
        self._group = group
        self._heads = [part.heads for part in parts]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim], the heads of all parts concatenated -> the same shape."""
        wide = x.float()
        squares = wide.square().sum(2)
        sums = torch.stack([part.sum(1) for part in squares.split_with_sizes(self._heads, 1)], 1)
        scales = torch.rsqrt(self._group.all_reduce(sums) / self._counts + self.eps)
        return (wide * scales[:, self._part_of_head, None] * self.weight).to(x.dtype)

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {
            part.name: evolve(
                plain_tensor((part.total_heads * self._head_dim,), self._dtype, 0), replicas=part.replicas
            )
            for part in self._parts
        }

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        rows = [loaded[part.name].view(part.heads, self._head_dim) for part in self._parts]
        self.weight = torch.cat(rows).to(torch_dtype(self._dtype))
        device = self.weight.device
        # The sum over ranks has the keys of each replica.
        counts = [part.total_heads * part.replicas * self._head_dim for part in self._parts]
        self._counts = torch.tensor(counts, dtype=torch.float32, device=device)
        numbers = [number for number, heads in enumerate(self._heads) for _ in range(heads)]
        self._part_of_head = torch.tensor(numbers, device=device)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes if hasattr(self, "weight") else 0
