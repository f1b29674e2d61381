"""Quantized experts on a GPU: weights of all experts in one tensor, multiplied by the Triton kernels of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from engine.core.autotune import AutotunedCall, Operands
from engine.core.errors import CheckpointError
from engine.core.layers import ExpertTensors, FusedExperts, torch_dtype
from engine.core.quant import (
    ACTIVATIONS,
    Activation,
    ExpertsBias,
    ExpertsKernel,
    ExpertsSpec,
    LinearSpec,
    Routing,
    TensorSpec,
)
from engine.ops.experts.pack import SYMMETRIC_ZERO, pack_int4
from engine.ops.experts.weights import ExpertMatrix, WeightFormat
from engine.plugins.quant.w4a16 import Reader
from engine.plugins.quant.w8_kernel import W8Kernel

GROUPS = (32, 64, 128)
"""Inputs that share a scale of 4-bit weights, as the kernels read them. More are stored as several groups."""


ReadMatrix = Callable[[LinearSpec, Mapping[str, torch.Tensor]], ExpertMatrix]
"""A linear layer of an expert, and its loaded tensors -> its matrix."""


class PackedExperts(ExpertsKernel):
    """Experts of any format that the Triton kernels read."""

    activations: ClassVar[tuple[Activation, ...]] = ACTIVATIONS

    def __init__(
        self,
        spec: ExpertsSpec,
        form: WeightFormat,
        tensors_of: Callable[[LinearSpec], Mapping[str, TensorSpec]],
        read: ReadMatrix,
        *,
        quantized: torch.dtype | None = None,
    ) -> None:
        """tensors_of: the tensors of an expert's linear layer. read: makes its matrix. quantized: the dtype that
        activations of many rows are quantized to."""
        self.spec = spec
        self.op = FusedExperts(spec, form, quantized)
        self._tensors = ExpertTensors(spec, tensors_of)
        self._read = read

    def tensors(self) -> Mapping[str, TensorSpec]:
        return self._tensors.specs()

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Read expert by expert into stacked tensors: gate_up, down, their scales and factors."""
        weights: dict[str, torch.Tensor] = {}
        experts = self.spec.rank_experts
        for index, expert in enumerate(experts):
            mine = self._tensors.of_expert(loaded, index)
            for name, linear in zip(("gate_up", "down"), self.spec.linears(expert), strict=True):
                matrix = self._read(linear, mine)
                parts = {name: matrix.values, f"{name}_scales": matrix.scales, f"{name}_factors": matrix.factor}
                for key, tensor in parts.items():
                    if tensor is None:
                        continue
                    if key not in weights:
                        weights[key] = tensor.new_empty((len(experts), *tensor.shape))
                    weights[key][index] = tensor
        return weights

    def apply(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        return self.op(x, routing, weights, bias)

    def autotuned_calls(self, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None) -> Sequence[AutotunedCall]:
        return [AutotunedCall(op=self.op, operands=Operands(weights=weights))]


def eight_bit_experts(spec: ExpertsSpec, reader_of: Callable[[LinearSpec], W8Kernel]) -> PackedExperts:
    """Experts with 8-bit weights. reader_of: the W8Kernel whose `merge` reads a linear layer of an expert."""
    first, second = (reader_of(one) for one in spec.linears(0))
    form = first.form
    is_block = form.granularity == "block"
    if is_block and first.scale_rows != second.scale_rows:
        raise CheckpointError(
            f"{spec.name}: an expert's {spec.rank_intermediate} intermediate features on a rank cut blocks of 128; use"
            " other ranks or a checkpoint quantized per channel"
        )

    def read(linear: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> ExpertMatrix:
        merged = reader_of(linear).merge(loaded)
        return ExpertMatrix(values=merged.weight, scales=merged.scale)

    return PackedExperts(
        spec,
        WeightFormat(kind="block" if is_block else "channel", dtype=form.dtype, scale_rows=first.scale_rows or 1),
        lambda one: reader_of(one).tensors(),
        read,
        quantized=None if form.activations == "none" else form.torch_dtype,
    )


def four_bit_experts(spec: ExpertsSpec, reader: Reader) -> PackedExperts:
    """Experts with 4-bit weights in groups. Raises CheckpointError for a scheme that the kernels do not read."""
    scheme = reader.scheme
    size = GROUPS[-1] if scheme.group_size == -1 or scheme.group_size % GROUPS[-1] == 0 else scheme.group_size
    if scheme.bits != 4 or size not in GROUPS or reader.ordered:
        order = ", in act-order" if reader.ordered else ""
        raise CheckpointError(
            f"experts of {scheme}{order} cannot be computed on a GPU; use a checkpoint of 4 bits in groups of"
            f" {', '.join(map(str, GROUPS))} or a multiple of {GROUPS[-1]}, without act-order (desc_act false)"
        )
    form = WeightFormat(kind="int4", group=size)

    def read(linear: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> ExpertMatrix:
        found = [reader.read(part, linear, loaded) for part in linear.parts]
        if any(one.input_factors is not None for one in found):
            raise CheckpointError(
                f"the inputs of {linear.parts[0].name} are multiplied by factors of their own, which experts on a GPU"
                " do not compute; use a checkpoint in another format"
            )
        values = torch.cat([one.values for one in found])
        inputs = values.shape[1]
        repeats = -(-inputs // size) if scheme.group_size == -1 else scheme.group_size // size

        def groups(of: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(of, 1).repeat_interleave(repeats, 0)[: -(-inputs // size)]

        zeros = [
            torch.full_like(one.scales, SYMMETRIC_ZERO, dtype=torch.uint8) if one.zeros is None else one.zeros
            for one in found
        ]
        return pack_int4(values, groups([one.scales for one in found]), groups(zeros), size, torch_dtype(spec.dtype))

    def tensors_of(linear: LinearSpec) -> Mapping[str, TensorSpec]:
        return {name: one for part in linear.parts for name, one in reader.tensors(part, linear).items()}

    return PackedExperts(spec, form, tensors_of, read)
