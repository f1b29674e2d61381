"""Linear layers with 4-bit or 8-bit weights and 16-bit activations: one kernel for the checkpoints of every method.

A `Reader` gives a part's numbers as the method means them. On a GPU they are packed again, once, into the layout of
layout.py. Where there are no kernels for it (a CPU, or float32 activations) the weights are made plain while loading:
oneDNN multiplies by them as fast as by any others, and unpacking at each call would take longer than it saves reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from engine.core.errors import CheckpointError
from engine.core.layers.activation import silu_and_mul
from engine.core.layers.base import torch_dtype
from engine.core.layers.matmul import multiply, pack
from engine.core.quant import LinearKernel, LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.layout import Layout
from engine.plugins.quant.packing import WORD

if TYPE_CHECKING:
    from engine.plugins.kernels.weight_only_launch import Multiplier

PACKED_DTYPES = ("bfloat16", "float16")
"""Of activations, that the kernels for GPUs take."""


@frozen(kw_only=True)
class Scheme:
    """How the numbers of a linear layer are quantized."""

    bits: int
    group_size: int
    """Inputs that share a scale and zero point; -1: all."""

    def __str__(self) -> str:
        shared = "a channel" if self.group_size == -1 else f"a group of {self.group_size}"
        return f"{self.bits} bits, a scale {shared}"

    def groups(self, inputs: int) -> int:
        """How many groups so many inputs have."""
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)


@frozen(kw_only=True, eq=False)
class Quantized:
    """A weight matrix: scale * (value - zero point), on this rank."""

    values: torch.Tensor
    """[outputs, inputs] uint8."""
    scales: torch.Tensor
    """[groups, outputs], a float type."""
    zeros: torch.Tensor | None
    """[groups, outputs] uint8; None: all are 2^(bits - 1)."""
    group_of: torch.Tensor | None
    """[inputs] int32, the group of each input; None: groups lie side by side."""

    def sorted(self, scheme: Scheme, unit: int) -> Sorted:
        """The same with groups side by side.

        Where a rank's inputs are of groups of any sizes, each group is filled up to a multiple of `unit` inputs, and
        becomes several groups of that size.
        """
        group_of = self.group_of
        if group_of is None:
            return Sorted(weight=self, order=None, group_size=scheme.group_size)
        order = torch.argsort(group_of, stable=True)
        inputs = len(order)
        size = inputs if scheme.group_size == -1 else scheme.group_size
        if torch.equal(group_of[order].long(), torch.arange(inputs, device=order.device) // size):
            weight = evolve(self, values=self.values[:, order], group_of=None)
            return Sorted(weight=weight, order=order, group_size=scheme.group_size)
        counts = torch.bincount(group_of, minlength=len(self.scales))
        units = -(-counts // unit)
        scales = self.scales.repeat_interleave(units, 0)
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(units, 0)
        group = group_of[order].long()
        within = torch.arange(inputs, device=order.device) - (counts.cumsum(0) - counts)[group]
        places = ((units.cumsum(0) - units) * unit)[group] + within
        sources = torch.zeros(len(scales) * unit, dtype=torch.int64, device=order.device)
        sources[places] = order
        # What is filled up meets some input, times scale * (zero point - zero point).
        centre = torch.full_like(scales, 2 ** (scheme.bits - 1), dtype=torch.uint8) if zeros is None else zeros
        values = centre.T.repeat_interleave(unit, 1)
        values[:, places] = self.values[:, order]
        return Sorted(
            weight=Quantized(values=values, scales=scales, zeros=zeros, group_of=None), order=sources, group_size=unit
        )

    def has_zeros(self, scheme: Scheme) -> bool:
        """Whether any zero point is not 2^(bits - 1)."""
        return self.zeros is not None and bool((self.zeros != 2 ** (scheme.bits - 1)).any())

    def dequantize(self, scheme: Scheme) -> torch.Tensor:
        """[outputs, inputs] float32."""
        inputs = self.values.shape[1]
        group_of = self.group_of
        if group_of is None:
            size = inputs if scheme.group_size == -1 else scheme.group_size
            group_of = torch.arange(inputs, device=self.values.device, dtype=torch.int32) // size
        centre = 2 ** (scheme.bits - 1) if self.zeros is None else self.zeros.float()[group_of].T
        return (self.values.float() - centre) * self.scales.float()[group_of].T


@frozen(kw_only=True, eq=False)
class Sorted:
    """A weight matrix whose groups lie side by side."""

    weight: Quantized
    order: torch.Tensor | None
    """Where its inputs come from: [inputs] int64; None: it was so."""
    group_size: int
    """As `Scheme.group_size`."""


def check_shares(spec: LinearSpec, part: LinearPart, scheme: Scheme, *, whole_groups: bool) -> None:
    """Raises CheckpointError where ranks that share a layer would cut words, or groups where these must be whole."""
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
    """How a method stores one part of a linear layer."""

    scheme: Scheme
    ordered: bool = False
    """Whether inputs are given to groups in an order of their own (act-order). Ranks that share inputs then have the
    scales and zero points of all groups, and the checkpoint says which group each input is in."""

    @abstractmethod
    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """What to read, by qualified name."""

    @abstractmethod
    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> Quantized:
        """The numbers. Raises CheckpointError, naming the tensor, for those that contradict each other."""


class Multipliers:
    """The kernels of each device, made when the first layer comes to it."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Multiplier] = {}

    def on(self, device: torch.device) -> Multiplier:
        """Of one GPU."""
        from engine.plugins.kernels.weight_only_launch import Multiplier

        if device not in self._made:
            self._made[device] = Multiplier(device)
        return self._made[device]


class PackedKernel(LinearKernel):
    """A linear layer of a Reader's parts.

    Parts that come with their inputs in one order are one matrix; others are multiplied one after the other, each by
    its own order of x.
    """

    def __init__(self, spec: LinearSpec, reader: Reader, multipliers: Multipliers) -> None:
        """Raises CheckpointError for a scheme that no layout holds, or where ranks that share the layer would cut what
        belongs together."""
        for part in spec.parts:
            check_shares(spec, part, reader.scheme, whole_groups=not reader.ordered)
        self.spec = spec
        self.reader = reader
        self.layout = Layout.choose(reader.scheme.bits, reader.scheme.group_size)
        self._multipliers = multipliers

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Those of the reader, for each part."""
        return {
            name: tensor for part in self.spec.parts for name, tensor in self.reader.tensors(part, self.spec).items()
        }

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Packed weights where there are kernels for them, else a plain one."""
        device = next(iter(loaded.values())).device
        if device.type == "cpu" or self.spec.dtype not in PACKED_DTYPES:
            return self.unpacked(loaded)
        return self.packed(loaded)

    def unpacked(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One plain matrix, as `matmul.pack` lays it out."""
        dtype = torch_dtype(self.spec.dtype)
        scheme = self.reader.scheme
        parts = [self.reader.read(part, self.spec, loaded).dequantize(scheme).to(dtype) for part in self.spec.parts]
        return {"weight": pack(torch.cat(parts) if len(parts) > 1 else parts[0])}

    def packed(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Words and scales of each matrix, and the order of its inputs where that is not x's; see Layout.

        Names end in the matrix's number.
        """
        scheme = self.reader.scheme
        parts = [
            self.reader.read(part, self.spec, loaded).sorted(scheme, self.layout.group) for part in self.spec.parts
        ]
        kind = _scale_dtype([part.weight.scales for part in parts], self.spec.dtype)
        has_zeros = any(part.weight.has_zeros(scheme) for part in parts)
        weights: dict[str, torch.Tensor] = {}
        number = 0
        while parts:
            order = parts[0].order
            packed = []
            while parts and _is_same(parts[0].order, order):
                packed.append(self._pack(parts.pop(0), kind, has_zeros))
            weights[f"words{number}"] = torch.cat([words for words, _ in packed], 1)
            weights[f"scales{number}"] = torch.cat([scales for _, scales in packed], 2)
            if order is not None:
                weights[f"order{number}"] = order.to(torch.int32)
            number += 1
        return weights

    def _pack(self, part: Sorted, kind: torch.dtype, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weight, zeros = part.weight, part.weight.zeros
        if has_zeros and zeros is None:
            zeros = torch.full_like(weight.scales, 2 ** (self.reader.scheme.bits - 1), dtype=torch.uint8)
        return self.layout.pack(
            weight.values, weight.scales.to(kind), zeros if has_zeros else None, part.group_size, self.spec.dtype
        )

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return self._multiply(x, weights, bias, gated=False)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See LinearKernel."""
        return self._multiply(x, weights, bias, gated=True)

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        if "weight" in weights:
            y = multiply(x, weights["weight"], bias)
            return silu_and_mul(y) if gated else y
        multiplier = self._multipliers.on(x.device)
        rows = x.reshape(-1, x.shape[-1])
        whole = "words1" not in weights
        results, first, number = [], 0, 0
        while (words := weights.get(f"words{number}")) is not None:
            order = weights.get(f"order{number}")
            last = first + words.shape[1]
            results.append(
                multiplier(
                    rows if order is None else multiplier.gather(rows, order),
                    words,
                    weights[f"scales{number}"],
                    self.layout,
                    None if bias is None else bias[first:last],
                    gated=gated and whole,
                )
            )
            first, number = last, number + 1
        y = results[0] if whole else torch.cat(results, -1)
        y = silu_and_mul(y) if gated and not whole else y
        return y.view(*x.shape[:-1], y.shape[-1])


def _is_same(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


def _scale_dtype(scales: list[torch.Tensor], dtype: str) -> torch.dtype:
    """The type scales are kept in: as stored, if that has 16 bits, else the activations'."""
    found = {part.dtype for part in scales}
    return found.pop() if len(found) == 1 and torch.float32 not in found else torch_dtype(dtype)
