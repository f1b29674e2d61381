"""W4A16 and W8A16 linear layers of integer weights in groups: one kernel for the checkpoints of all methods.

A `Reader` reads a part's weights. On a GPU they are repacked once, into a GroupedLayout (ops/gemm/packed_layout.py).
Without kernels for it (on a CPU, or with float32 activations) the weights are dequantized at load: oneDNN multiplies by
them as fast as by any others, and unpacking at each call would take longer than it saves in reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from engine.core.autotune import AutotunedCall, Operands
from engine.core.errors import CheckpointError
from engine.core.layers import gated_activation, multiply, pack, torch_dtype
from engine.core.quant import ACTIVATIONS, LinearKernel, LinearSpec, TensorSpec
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix
from engine.plugins.quant.w4a16 import Reader, SortedWeight, check_shards
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul

PACKED_DTYPES = ("bfloat16", "float16")
"""Dtypes of activations that the GPU kernels support."""


@frozen(kw_only=True, eq=False)
class Section:
    """Consecutive outputs whose inputs have one order and the same factors."""

    matrix: PackedMatrix
    order: torch.Tensor | None
    """For each input of the matrix, the input of x that it reads: [inputs] int32. None: x's order."""
    factors: torch.Tensor | None
    """[inputs], in x's dtype: x is multiplied by these numbers first. None: by none."""
    outputs: slice

    def inputs_of(self, x: torch.Tensor, matmul: WeightOnlyMatmul) -> torch.Tensor:
        """The inputs of the matrix, from x: [rows, inputs]."""
        if self.factors is not None:
            return x * self.factors
        return x if self.order is None else matmul.gather(x, self.order)

    def part_of(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The slice of the layer's bias for these outputs."""
        return None if bias is None else bias[self.outputs]


class W4A16Kernel(LinearKernel):
    """A linear layer whose parts a Reader reads.

    Parts whose inputs have the same order and factors form one matrix. Other matrices are multiplied one after the
    other, each by its own permutation or multiple of x.
    """

    activations = ACTIVATIONS

    def __init__(self, spec: LinearSpec, reader: Reader, matmuls: WeightOnlyMatmuls) -> None:
        """Raises CheckpointError for a scheme that no layout holds, or where sharding the layer would cut words or
        groups."""
        for part in spec.parts:
            check_shards(spec, part, reader.scheme, whole_groups=not reader.ordered)
        self.spec = spec
        self.reader = reader
        try:
            self.layout = GroupedLayout.choose(reader.scheme.bits, reader.scheme.group_size)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._activate = gated_activation(spec.activation)
        self._matmuls = matmuls
        self._last: tuple[Mapping[str, torch.Tensor], Sequence[Section]] = {}, ()
        """The weights of the last call, and their sections."""

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The reader's tensors of all parts."""
        return {
            name: tensor for part in self.spec.parts for name, tensor in self.reader.tensors(part, self.spec).items()
        }

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Packed weights where there are kernels for them, else a plain matrix."""
        device = next(iter(loaded.values())).device
        if device.type == "cpu" or self.spec.dtype not in PACKED_DTYPES:
            return self.dequantize_weights(loaded)
        return self.pack_weights(loaded)

    def dequantize_weights(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One plain matrix, in the layout of `engine.core.layers.pack`."""
        dtype = torch_dtype(self.spec.dtype)
        scheme = self.reader.scheme
        parts = [self.reader.read(part, self.spec, loaded).dequantize(scheme).to(dtype) for part in self.spec.parts]
        return {"weight": pack(torch.cat(parts) if len(parts) > 1 else parts[0])}

    def pack_weights(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Packed weights and scales of each matrix, and the order and factors of its inputs where these are not x's;
        see GroupedLayout.

        Names end in the number of the matrix.
        """
        scheme = self.reader.scheme
        parts = [
            self.reader.read(part, self.spec, loaded).sorted(scheme, self.layout.group) for part in self.spec.parts
        ]
        scale_dtype = _scale_dtype([part.weight.scales for part in parts], self.spec.dtype)
        has_zeros = any(part.weight.has_zeros(scheme) for part in parts)
        weights: dict[str, torch.Tensor] = {}
        number = 0
        while parts:
            order, factors = parts[0].order, parts[0].weight.input_factors
            packed = []
            while parts and _is_same(parts[0].order, order) and _is_same(parts[0].weight.input_factors, factors):
                packed.append(self._pack(parts.pop(0), scale_dtype, has_zeros))
            weights[f"packed{number}"] = torch.cat([packed for packed, _ in packed], 1)
            weights[f"scales{number}"] = torch.cat([scales for _, scales in packed], 2)
            if order is not None:
                weights[f"order{number}"] = order.to(torch.int32)
            if factors is not None:
                weights[f"factors{number}"] = factors.to(torch_dtype(self.spec.dtype))
            number += 1
        return weights

    def _pack(self, part: SortedWeight, scale_dtype: torch.dtype, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weight, zeros = part.weight, part.weight.zeros
        if has_zeros and zeros is None:
            zeros = torch.full_like(weight.scales, 2 ** (self.reader.scheme.bits - 1), dtype=torch.uint8)
        return self.layout.pack(
            weight.values,
            weight.scales.to(scale_dtype),
            zeros if has_zeros else None,
            part.group_size,
            torch_dtype(self.spec.dtype),
        )

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x, weights, bias, gated=False)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._multiply(x, weights, bias, gated=True)

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        if "weight" in weights:
            y = multiply(x, weights["weight"], bias)
            return self._activate(y) if gated else y
        matmul = self._matmuls.on(x.device)
        rows = x.reshape(-1, x.shape[-1])
        sections = self._sections_of(weights)
        fuse_gating = gated and len(sections) == 1
        results = [
            matmul(
                one.inputs_of(rows, matmul),
                one.matrix,
                one.part_of(bias),
                gated=fuse_gating,
                activation=self.spec.activation,
            )
            for one in sections
        ]
        y = results[0] if len(results) == 1 else torch.cat(results, -1)
        y = self._activate(y) if gated and not fuse_gating else y
        return y.view(*x.shape[:-1], y.shape[-1])

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """One call per packed matrix."""
        if "weight" in weights:
            return ()
        from engine.ops.gemm.weight_only_tiles import WeightOnlyShape
        from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

        sections = self._sections_of(weights)
        found = []
        for one in sections:
            matrix = one.matrix
            shape = WeightOnlyShape(
                gated=self.spec.gated and len(sections) == 1,
                weight_rows=matrix.rows,
                inputs=self.spec.rank_inputs if one.order is None else len(one.order),
                layout=self.layout,
                dtype=torch_dtype(self.spec.dtype),
                zeros=matrix.zeros,
                activation=self.spec.activation,
            )
            op = WeightOnlyOp(self._matmuls.on(matrix.packed.device), shape)
            operands = Operands(weights=matrix.tensors, bias=one.part_of(bias))
            found.append(AutotunedCall(op=op, operands=operands))
        return found

    def _sections_of(self, weights: Mapping[str, torch.Tensor]) -> Sequence[Section]:
        """The sections of `weights`; kept from call to call, as a layer passes the same mapping each time."""
        if self._last[0] is not weights:
            self._last = weights, tuple(self._read(weights))
        return self._last[1]

    def _read(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Section]:
        """The sections of weights that `pack_weights` returned."""
        first, number = 0, 0
        while (packed := weights.get(f"packed{number}")) is not None:
            last = first + packed.shape[1]
            matrix = PackedMatrix(packed=packed, scales=weights[f"scales{number}"], layout=self.layout)
            yield Section(
                matrix=matrix,
                order=weights.get(f"order{number}"),
                factors=weights.get(f"factors{number}"),
                outputs=slice(first, last),
            )
            first, number = last, number + 1


def _is_same(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


def _scale_dtype(scales: list[torch.Tensor], dtype: str) -> torch.dtype:
    """The dtype of packed scales: as stored, if all are the same 16-bit dtype, else that of activations."""
    found = {part.dtype for part in scales}
    return found.pop() if len(found) == 1 and torch.float32 not in found else torch_dtype(dtype)
