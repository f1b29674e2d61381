"""Experts of one layer around any kernel, and the kernel without quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import evolve

from engine.core.distributed.partial_sum import PartialSum
from engine.core.layers.activation import gated_activation
from engine.core.layers.base import plain_tensor, torch_dtype
from engine.core.layers.expert_tensors import ExpertTensors
from engine.core.layers.kernel_layer import KernelLayer
from engine.core.layers.linear import BIAS_SHARD_DIM, PlainKernel
from engine.core.layers.matmul import compiled_shapes, multiply
from engine.core.plugin_host.result_checks import tensor_error
from engine.core.quant.base import ACTIVATIONS, Activation, LinearSpec, TensorSpec
from engine.core.quant.experts import ExpertsBias, ExpertsKernel, ExpertsSpec, Routing

if TYPE_CHECKING:
    from engine.core.autotune.op import AutotunedCall
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.plugin_host.result_checks import ResultChecks

ByExpert = Callable[[int, torch.Tensor], torch.Tensor]
"""Number of one of this rank's experts, and its tokens [rows, hidden_size] -> its results, of the same shape."""


def sum_of_experts(x: torch.Tensor, routing: Routing, num_experts: int, compute: ByExpert) -> torch.Tensor:
    """The weighted sum of each token's experts, one expert after the other. Reads the routing on the host.

    x: [tokens, hidden_size]; num_experts: this rank's.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    top_k = routing.experts.shape[1]
    chosen = routing.experts.reshape(-1)
    order = chosen.argsort(stable=True)
    weights = routing.weights.reshape(-1, 1)
    begin = int((chosen < 0).sum())
    for expert, count in enumerate(torch.bincount(chosen[chosen >= 0], minlength=num_experts).tolist()):
        if count:
            pairs = order[begin : begin + count]
            tokens = pairs // top_k
            total.index_add_(0, tokens, compute(expert, x[tokens]).float() * weights[pairs])
            begin += count
    return total.to(x.dtype)


class PlainExperts(ExpertsKernel):
    """Unquantized weights, in the model's dtype."""

    activations: ClassVar[tuple[Activation, ...]] = ACTIVATIONS

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec = spec
        self._tensors = ExpertTensors(spec, lambda linear: PlainKernel(linear).tensors())

    def tensors(self) -> Mapping[str, TensorSpec]:
        return self._tensors.specs()

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """gate_up: [experts, 2 * intermediate, hidden], gates first; down: [experts, hidden, intermediate]."""
        spec, dtype = self.spec, torch_dtype(self.spec.dtype)
        if spec.stacked and not spec.transposed and not spec.interleaved:
            gate_up, down = loaded.values()
            return {"gate_up": gate_up.to(dtype), "down": down.to(dtype)}
        device = next(iter(loaded.values())).device
        inner, count = spec.rank_intermediate, len(spec.rank_experts)
        gate_up = torch.empty((count, 2 * inner, spec.hidden_size), dtype=dtype, device=device)
        down = torch.empty((count, spec.hidden_size, inner), dtype=dtype, device=device)
        for index in range(count):
            gate, up, out = self._tensors.of_expert(loaded, index).values()
            gate_up[index, :inner], gate_up[index, inner:], down[index] = gate, up, out
        return {"gate_up": gate_up, "down": down}

    def apply(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        if x.device.type != "cpu":
            return self.without_host(x, routing, weights, bias)
        return sum_of_experts(x, routing, len(weights["gate_up"]), self._by_expert(weights, bias))

    def without_host(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        """As `apply`, in CUDA graphs, whose host does not know the routing: every expert computes every token."""
        compute = self._by_expert(weights, bias)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(weights["gate_up"])):
            factor = (routing.weights * (routing.experts == expert)).sum(1, keepdim=True)
            total += compute(expert, x).float() * factor
        return total.to(x.dtype)

    def _by_expert(self, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None) -> ByExpert:
        gate_up, down = weights["gate_up"], weights["down"]
        activate = gated_activation(self.spec.activation)

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            hidden = multiply(rows, gate_up[expert], None if bias is None else bias.gate_up[expert])
            return multiply(activate(hidden), down[expert], None if bias is None else bias.down[expert])

        return compute


class Experts(KernelLayer[ExpertsKernel]):
    """The experts of one layer, by any kernel. This layer reads the biases."""

    def __init__(
        self, spec: ExpertsSpec, kernel: ExpertsKernel, group: RankGroup, *, owner: str = "the quantization method"
    ) -> None:
        """owner: how errors name the plugin that made the kernel."""
        super().__init__(kernel, spec.name, owner)
        self.spec = spec
        self.bias: ExpertsBias | None = None
        self._group = group
        self._apply = kernel.apply
        self._biases = ExpertTensors(spec, _bias_tensors) if spec.bias else None

    def __call__(self, x: torch.Tensor, routing: Routing) -> PartialSum:
        """The weighted sum of each token's experts. x: [tokens, hidden_size] -> the same shape."""
        return PartialSum(self._apply(x, routing, self.weights, self.bias), self._group)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The kernel's tensors and the biases."""
        given = self._kernel_tensors()
        return given if self._biases is None else {**given, **self._biases.specs()}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Have the kernel prepare its tensors, and stack the biases."""
        biases = {} if self._biases is None else self._biases.specs()
        if self._biases is not None:
            self.bias = self._read_biases(self._biases, loaded)
        self._prepare({name: loaded[name] for name in loaded if name not in biases})

    def check_results(self, checks: ResultChecks) -> None:
        """Check what the kernel returns, until the checks end. Core's own kernels are not checked."""
        if self.has_core_kernel:
            return

        dtype = self.spec.dtype

        def check(result: object, x: torch.Tensor, *others: object) -> str | None:
            return tensor_error(result, tuple(x.shape), (dtype,), x.device)

        call = evolve(self.plugin_call, call=f"apply() of {self.spec.name}")
        self._apply = checks.call(self.kernel.apply, call, check)
        checks.at_end(lambda: setattr(self, "_apply", self.kernel.apply))

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        with self._blame("autotuned_calls()"):
            return self.kernel.autotuned_calls(self.weights, self.bias)

    @property
    def nbytes(self) -> int:
        kept = list(self.weights.values()) + ([] if self.bias is None else [self.bias.gate_up, self.bias.down])
        return sum(tensor.nbytes for tensor in kept)

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        return compiled_shapes(*self.weights.values())

    def _read_biases(self, tensors: ExpertTensors, loaded: Mapping[str, torch.Tensor]) -> ExpertsBias:
        spec, dtype = self.spec, torch_dtype(self.spec.dtype)
        found = [list(tensors.of_expert(loaded, index).values()) for index in range(len(spec.rank_experts))]
        down = torch.stack([one[2] for one in found]).to(dtype)
        if spec.parallel == "tensor" and spec.rank > 0:
            down = torch.zeros_like(down)  # rank 0 adds them
        return ExpertsBias(torch.stack([torch.cat(one[:2]) for one in found]).to(dtype), down)


def _bias_tensors(linear: LinearSpec) -> Mapping[str, TensorSpec]:
    shard_dim = BIAS_SHARD_DIM[linear.parallel]
    return {f"{part.name}.bias": plain_tensor((part.out_features,), linear.dtype, shard_dim) for part in linear.parts}
