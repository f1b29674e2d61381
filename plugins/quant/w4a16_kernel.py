"""Linear layers with 4-bit or 8-bit weights and 16-bit activations: one kernel for the checkpoints of every method.

A `Reader` gives a part's numbers as the method means them. On a GPU they are packed again, once, into the layout of
layout.py. Where there are no kernels for it (a CPU, or float32 activations) the weights are made plain while loading:
oneDNN multiplies by them as fast as by any others, and unpacking at each call would take longer than it saves reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from engine.core.autotune import AutotunedCall, Operands
from engine.core.errors import CheckpointError
from engine.core.layers import multiply, pack, silu_and_mul, torch_dtype
from engine.core.quant import LinearKernel, LinearSpec, TensorSpec
from engine.ops.gemm.packed_layout import Layout, PackedMatrix
from engine.plugins.quant.w4a16 import Reader, Sorted, check_shares

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_launch import Multiplier

PACKED_DTYPES = ("bfloat16", "float16")
"""Of activations, that the kernels for GPUs take."""


class Multipliers:
    """The kernels of each device, made when the first layer comes to it."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Multiplier] = {}

    def on(self, device: torch.device) -> Multiplier:
        """Of one GPU."""
        from engine.ops.gemm.weight_only_launch import Multiplier

        if device not in self._made:
            self._made[device] = Multiplier(device)
        return self._made[device]


@frozen(kw_only=True, eq=False)
class Section:
    """Outputs side by side whose inputs come in one order."""

    matrix: PackedMatrix
    order: torch.Tensor | None
    """Where its inputs come from; None: they are x's."""
    outputs: slice

    def part_of(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The layer's bias, as far as it is of these outputs."""
        return None if bias is None else bias[self.outputs]


class W4A16Kernel(LinearKernel):
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
        try:
            self.layout = Layout.choose(reader.scheme.bits, reader.scheme.group_size)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._multipliers = multipliers
        self._last: tuple[Mapping[str, torch.Tensor], Sequence[Section]] = {}, ()
        """The weights given last, and their sections."""

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
            weight.values,
            weight.scales.to(kind),
            zeros if has_zeros else None,
            part.group_size,
            torch_dtype(self.spec.dtype),
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
        sections = self._sections_of(weights)
        gated_at_once = gated and len(sections) == 1
        results = [
            multiplier(
                rows if one.order is None else multiplier.gather(rows, one.order),
                one.matrix,
                one.part_of(bias),
                gated=gated_at_once,
            )
            for one in sections
        ]
        y = results[0] if len(results) == 1 else torch.cat(results, -1)
        y = silu_and_mul(y) if gated and not gated_at_once else y
        return y.view(*x.shape[:-1], y.shape[-1])

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """One for each matrix that is packed."""
        if "weight" in weights:
            return ()
        from engine.ops.gemm.weight_only_tiles import GemmShape
        from engine.plugins.quant.weight_only_tuning import WeightOnly

        sections = self._sections_of(weights)
        found = []
        for one in sections:
            matrix = one.matrix
            problem = GemmShape(
                gated=self.spec.gated and len(sections) == 1,
                weight_rows=matrix.rows,
                inputs=self.spec.rank_inputs if one.order is None else len(one.order),
                layout=self.layout,
                dtype=torch_dtype(self.spec.dtype),
                zeros=matrix.zeros,
            )
            op = WeightOnly(self._multipliers.on(matrix.words.device), problem)
            operands = Operands(weights=matrix.tensors, bias=one.part_of(bias))
            found.append(AutotunedCall(op=op, operands=operands))
        return found

    def _sections_of(self, weights: Mapping[str, torch.Tensor]) -> Sequence[Section]:
        """Kept, as a layer gives the same mapping, unchanged, at each call."""
        if self._last[0] is not weights:
            self._last = weights, tuple(self._read(weights))
        return self._last[1]

    def _read(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Section]:
        """What `packed` named by numbers."""
        first, number = 0, 0
        while (words := weights.get(f"words{number}")) is not None:
            last = first + words.shape[1]
            matrix = PackedMatrix(words=words, scales=weights[f"scales{number}"], layout=self.layout)
            yield Section(matrix=matrix, order=weights.get(f"order{number}"), outputs=slice(first, last))
            first, number = last, number + 1


def _is_same(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


def _scale_dtype(scales: list[torch.Tensor], dtype: str) -> torch.dtype:
    """The type scales are kept in: as stored, if that has 16 bits, else the activations'."""
    found = {part.dtype for part in scales}
    return found.pop() if len(found) == 1 and torch.float32 not in found else torch_dtype(dtype)
