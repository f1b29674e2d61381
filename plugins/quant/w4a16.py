"""Linear layers with 4-bit or 8-bit weights and 16-bit activations: one kernel for the checkpoints of every method.

A `Reader` gives a part's numbers as the method means them. On a GPU they are packed again, once, into the layout of
layout.py. Where there are no kernels for it (a CPU, or float32 activations) the weights are made plain while loading:
oneDNN multiplies by them as fast as by any others, and unpacking at each call would take longer than it saves reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from engine.core.layers.activation import silu_and_mul
from engine.core.layers.base import torch_dtype
from engine.core.layers.matmul import multiply, pack
from engine.core.quant import LinearKernel, LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.layout import Layout

if TYPE_CHECKING:
    from engine.core.device import DeviceInfo
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

    def sorted(self) -> tuple[Quantized, torch.Tensor | None]:
        """The same with groups side by side, and where its inputs come from: [inputs] int64; None: it was so."""
        if self.group_of is None:
            return self, None
        order = torch.argsort(self.group_of, stable=True)
        return evolve(self, values=self.values[:, order], group_of=None), order

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


def no_kernel(device: DeviceInfo) -> str | None:
    """Why there is no kernel for a device; None: there is one."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "its kernels for GPUs are written in Triton, which is not installed; install triton"
    return None


class Reader(ABC):
    """How a method stores one part of a linear layer."""

    scheme: Scheme

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
        """Raises CheckpointError for a scheme that no layout holds."""
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
        parts = [self.reader.read(part, self.spec, loaded).sorted() for part in self.spec.parts]
        kind = _scale_dtype([part.scales for part, _ in parts], self.spec.dtype)
        has_zeros = any(part.has_zeros(self.reader.scheme) for part, _ in parts)
        weights: dict[str, torch.Tensor] = {}
        number = 0
        while parts:
            order = parts[0][1]
            packed = []
            while parts and _is_same(parts[0][1], order):
                packed.append(self._pack(parts.pop(0)[0], kind, has_zeros))
            weights[f"words{number}"] = torch.cat([words for words, _ in packed], 1)
            weights[f"scales{number}"] = torch.cat([scales for _, scales in packed], 2)
            if order is not None:
                weights[f"order{number}"] = order.to(torch.int32)
            number += 1
        return weights

    def _pack(self, part: Quantized, kind: torch.dtype, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
        scheme = self.reader.scheme
        zeros = part.zeros
        if has_zeros and zeros is None:
            zeros = torch.full_like(part.scales, 2 ** (scheme.bits - 1), dtype=torch.uint8)
        return self.layout.pack(
            part.values, part.scales.to(kind), zeros if has_zeros else None, scheme.group_size, self.spec.dtype
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
