"""Weights of 4 or 8 bits with scales per group of inputs, and the contract of readers of their checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from engine.core.errors import CheckpointError
from engine.core.quant import LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.packing import WORD

SCALE_DTYPES = ("float16", "bfloat16", "float32")
"""dtypes of stored scales."""


def check_group_size(size: Any, where: str) -> int:
    """Return a group size as checkpoints state it. Raises CheckpointError for other values. where: begins the error."""
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(f"{where}: group_size is {size!r}; it must be a whole number, or -1 for all inputs")
    return size


@frozen(kw_only=True)
class GroupScheme:
    """How the weights of a linear layer are quantized."""

    bits: int
    group_size: int
    """Inputs that share a scale and zero point. -1: all."""

    def __str__(self) -> str:
        shared = "channel" if self.group_size == -1 else f"group of {self.group_size}"
        return f"{self.bits} bits, a scale per {shared}"

    def groups(self, inputs: int) -> int:
        """Number of groups of this many inputs."""
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)


@frozen(kw_only=True, eq=False)
class QuantizedWeight:
    """This rank's part of a quantized weight matrix: scale * (value - zero point)."""

    values: torch.Tensor
    """[outputs, inputs] uint8."""
    scales: torch.Tensor
    """[groups, outputs], a float dtype."""
    zeros: torch.Tensor | None
    """[groups, outputs] uint8; None: all are 2^(bits - 1)."""
    group_of: torch.Tensor | None
    """[inputs] int32, the group of each input. None: groups are consecutive inputs."""
    input_factors: torch.Tensor | None = None
    """[inputs], a float dtype: x is multiplied by these numbers first. None: by none."""

    def sorted(self, scheme: GroupScheme, unit: int) -> SortedWeight:
        """Sort the inputs so that groups are consecutive.

        Where a rank's inputs do not fill whole groups (act-order, sharded inputs), each group is padded to a multiple
        of `unit` inputs and split into groups of that size.
        """
        group_of = self.group_of
        if group_of is None:
            return SortedWeight(weight=self, order=None, group_size=scheme.group_size)
        if self.input_factors is not None:
            raise CheckpointError(
                "weights with act-order and factors of their inputs are not supported; use a checkpoint with one of"
                " the two"
            )
        order = torch.argsort(group_of, stable=True)
        inputs = len(order)
        size = inputs if scheme.group_size == -1 else scheme.group_size
        if torch.equal(group_of[order].long(), torch.arange(inputs, device=order.device) // size):
            weight = evolve(self, values=self.values[:, order], group_of=None)
            return SortedWeight(weight=weight, order=order, group_size=scheme.group_size)
        counts = torch.bincount(group_of, minlength=len(self.scales))
        units = -(-counts // unit)
        scales = self.scales.repeat_interleave(units, 0)
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(units, 0)
        group = group_of[order].long()
        within = torch.arange(inputs, device=order.device) - (counts.cumsum(0) - counts)[group]
        places = ((units.cumsum(0) - units) * unit)[group] + within
        sources = torch.zeros(len(scales) * unit, dtype=torch.int64, device=order.device)
        sources[places] = order
        # Padding multiplies some input by scale * (zero point - zero point) = 0.
        centre = torch.full_like(scales, 2 ** (scheme.bits - 1), dtype=torch.uint8) if zeros is None else zeros
        values = centre.T.repeat_interleave(unit, 1)
        values[:, places] = self.values[:, order]
        return SortedWeight(
            weight=QuantizedWeight(values=values, scales=scales, zeros=zeros, group_of=None),
            order=sources,
            group_size=unit,
        )

    def has_zeros(self, scheme: GroupScheme) -> bool:
        """Whether any zero point differs from 2^(bits - 1)."""
        return self.zeros is not None and bool((self.zeros != 2 ** (scheme.bits - 1)).any())

    def dequantize(self, scheme: GroupScheme) -> torch.Tensor:
        """The weight that multiplies x itself, [outputs, inputs] float32."""
        inputs = self.values.shape[1]
        group_of = self.group_of
        if group_of is None:
            size = inputs if scheme.group_size == -1 else scheme.group_size
            group_of = torch.arange(inputs, device=self.values.device, dtype=torch.int32) // size
        centre = 2 ** (scheme.bits - 1) if self.zeros is None else self.zeros.float()[group_of].T
        weight = (self.values.float() - centre) * self.scales.float()[group_of].T
        return weight if self.input_factors is None else weight * self.input_factors.float()


@frozen(kw_only=True, eq=False)
class SortedWeight:
    """A quantized weight matrix whose groups are consecutive inputs."""

    weight: QuantizedWeight
    order: torch.Tensor | None
    """For each input of `weight`, the input of x that it reads: [inputs] int64. None: the same order as x."""
    group_size: int
    """As `GroupScheme.group_size`."""


def check_shards(spec: LinearSpec, part: LinearPart, scheme: GroupScheme, *, whole_groups: bool) -> None:
    """Raises CheckpointError where sharding a layer would cut packed words, or groups if they must be whole."""
    outputs, inputs = spec.rank_outputs(part), spec.rank_inputs
    if outputs != part.out_features and outputs * scheme.bits % WORD:
        raise CheckpointError(
            f"{spec.ranks} ranks share the {part.out_features} outputs of {part.name}, {outputs} each, which cuts words"
            f" of {WORD // scheme.bits} numbers; use fewer ranks"
        )
    if inputs == spec.in_features:
        return
    if whole_groups and scheme.group_size != -1 and inputs % scheme.group_size:
        raise CheckpointError(
            f"{spec.ranks} ranks share the {spec.in_features} inputs of {part.name}, {inputs} each, which cuts groups"
            f" of {scheme.group_size}; use fewer ranks"
        )
    if inputs * scheme.bits % WORD:
        raise CheckpointError(
            f"{spec.ranks} ranks share the {spec.in_features} inputs of {part.name}, {inputs} each, which cuts words of"
            f" {WORD // scheme.bits} numbers; use fewer ranks"
        )


class Reader(ABC):
    """Reads one part of a linear layer from a method's checkpoint tensors."""

    scheme: GroupScheme
    ordered: bool = False
    """Act-order: whether inputs are assigned to groups in another order than their own. Ranks that share inputs then
    have the scales and zero points of all groups, and the checkpoint stores the group of each input."""

    @abstractmethod
    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """Tensors to read, by qualified name."""

    @abstractmethod
    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The quantized weight. Raises CheckpointError, naming the tensor, for inconsistent tensors."""
