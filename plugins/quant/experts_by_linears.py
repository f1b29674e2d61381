"""Quantized experts on a CPU: each by the linear kernels that its method has for a linear layer of the same format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from engine.core.layers import ExpertTensors, gated_activation, sum_of_experts
from engine.core.quant import (
    ACTIVATIONS,
    Activation,
    ExpertsBias,
    ExpertsKernel,
    ExpertsSpec,
    LinearKernel,
    LinearSpec,
    Routing,
    TensorSpec,
)

MakeLinear = Callable[[LinearSpec], LinearKernel]
Weights = Mapping[str, torch.Tensor]


class ExpertsByLinears(ExpertsKernel):
    """One expert after the other, each by two linear kernels. Reads the routing on the host."""

    activations: ClassVar[tuple[Activation, ...]] = ACTIVATIONS

    def __init__(self, spec: ExpertsSpec, linear: MakeLinear) -> None:
        """linear: makes the kernel of a projection of one expert."""
        self.spec = spec
        self._tensors = ExpertTensors(spec, lambda one: linear(one).tensors())
        self._activate = gated_activation(spec.activation)
        self._kernels = [[linear(one) for one in spec.linears(expert)] for expert in spec.rank_experts]
        self._last: tuple[Weights, Sequence[Sequence[Weights]]] | None = None
        """The weights of the last call, and those of each kernel."""

    def tensors(self) -> Mapping[str, TensorSpec]:
        return self._tensors.specs()

    def prepare(self, loaded: Weights) -> Weights:
        """The kernels' weights, as NUMBER.0.NAME (gate and up) and NUMBER.1.NAME (down)."""
        weights: dict[str, torch.Tensor] = {}
        for index, kernels in enumerate(self._kernels):
            mine = self._tensors.of_expert(loaded, index)
            for place, kernel in enumerate(kernels):
                names = kernel.tensors().keys()
                made = kernel.prepare({name: tensor for name, tensor in mine.items() if name in names})
                weights |= {f"{index}.{place}.{name}": tensor for name, tensor in made.items()}
        return weights

    def apply(self, x: torch.Tensor, routing: Routing, weights: Weights, bias: ExpertsBias | None) -> torch.Tensor:
        split = self._split(weights)

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            (gate_up, down), (first, second) = self._kernels[expert], split[expert]
            hidden = self._activate(gate_up.apply(rows, first, None if bias is None else bias.gate_up[expert]))
            return down.apply(hidden, second, None if bias is None else bias.down[expert])

        return sum_of_experts(x, routing, len(self._kernels), compute)

    def _split(self, weights: Weights) -> Sequence[Sequence[Weights]]:
        """The weights of each kernel; kept from call to call, as a layer passes the same mapping each time."""
        if self._last is None or self._last[0] is not weights:
            split: list[list[dict[str, torch.Tensor]]] = [[{}, {}] for _ in self._kernels]
            for name, tensor in weights.items():
                index, place, rest = name.split(".", 2)
                split[int(index)][int(place)][rest] = tensor
            self._last = weights, split
        return self._last[1]
