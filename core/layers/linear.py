"""Linear layers around any kernel, and the kernel without quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve

from engine.core.distributed.partial_sum import PartialSum
from engine.core.errors import CheckpointError
from engine.core.layers.activation import gated_activation
from engine.core.layers.base import plain_tensor, torch_dtype
from engine.core.layers.checked_kernel import CheckedFusedInputQuantization, CheckedKernel
from engine.core.layers.kernel_layer import KernelLayer
from engine.core.layers.matmul import compiled_shapes, multiply, pack
from engine.core.quant.base import (
    Activation,
    FusedInputQuantization,
    LinearKernel,
    LinearPart,
    LinearSpec,
    Parallel,
    QuantizedActivation,
    StoredIn,
    TensorSpec,
)

if TYPE_CHECKING:
    from engine.core.autotune.op import AutotunedCall
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.plugin_host.result_checks import ResultChecks

Apply = Callable[..., torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Reduces a partial sum over all ranks."""
TensorOrQuantized = torch.Tensor | QuantizedActivation
"""Input of a linear layer: [..., in_features], or an activation that was quantized for this layer."""

WEIGHT_SHARD_DIM: Mapping[Parallel, int | None] = {"none": None, "column": 0, "row": 1}
BIAS_SHARD_DIM: Mapping[Parallel, int | None] = {"none": None, "column": 0, "row": None}


class PlainKernel(LinearKernel):
    """Unquantized weights, in the model's dtype."""

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec

    def tensors(self) -> Mapping[str, TensorSpec]:
        """NAME.weight of each part: [out_features, in_features]."""
        spec = self._spec
        shard_dim = WEIGHT_SHARD_DIM[spec.parallel]
        return {
            _weight(part): plain_tensor((part.out_features, spec.in_features), spec.dtype, shard_dim)
            for part in spec.parts
        }

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One matrix of all parts' outputs in order, packed by `matmul.pack`."""
        return {"weight": pack(merge([loaded[_weight(part)] for part in self._spec.parts], self._spec.dtype))}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weights["weight"], bias)


class Linear(KernelLayer[LinearKernel]):
    """y = x W^T + b by any kernel. The outputs of merged parts are concatenated."""

    def __init__(
        self,
        spec: LinearSpec,
        kernel: LinearKernel,
        reduce: Reduce | None = None,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        adds_bias: bool = True,
        owner: str = "the quantization method",
    ) -> None:
        """reduce: given if y is a partial sum that this layer reduces. activate: for `gated`, where the kernel does not
        activate; None: the spec's activation by PyTorch operations. adds_bias: False if another rank adds it. owner:
        how errors name the plugin that made the kernel.
        """
        super().__init__(kernel, spec.parts[0].name, owner)
        self.spec = spec
        self.bias: torch.Tensor | None = None
        self._reduce = reduce
        self._activate = activate or gated_activation(spec.activation)
        self._adds_bias = adds_bias
        overridden = type(kernel).apply_gated is not LinearKernel.apply_gated
        self._has_gated_kernel = overridden and spec.activation in kernel.activations and reduce is None
        with self._blame("fused_input_quantization()"):
            self._fused = fused = kernel.fused_input_quantization()
        right = fused is None or isinstance(fused, FusedInputQuantization)
        self._expect(right, "fused_input_quantization()", fused, "a FusedInputQuantization or None")
        self._fuses_activation = fused is not None and spec.input_activation in fused.activations
        self._bind(kernel, self._fused)

    def _bind(self, kernel: LinearKernel | CheckedKernel, fused: FusedInputQuantization | None) -> None:
        """Call the methods of these objects from now on."""
        self._apply: Apply = kernel.apply
        self._apply_gated: Apply | None = kernel.apply_gated if self._has_gated_kernel else None
        refuse = partial(_refuse, self.spec)
        self._apply_quantized: Apply = refuse if fused is None else fused.apply
        self._apply_gated_quantized: Apply = refuse if fused is None else fused.apply_quantized_gated
        self._fused_input_quantization = fused

    def check_results(self, checks: ResultChecks) -> None:
        """Check what the kernel returns, until the checks end. Core's own kernels are not checked."""
        if self.has_core_kernel:
            return
        fused = self._fused
        if fused is not None:
            checked = CheckedFusedInputQuantization(fused, self.spec, checks, self.plugin_call)
            fused = cast(FusedInputQuantization, checked)  # it has the same methods
        self._bind(CheckedKernel(self.kernel, self.spec, checks, self.plugin_call), fused)
        checks.at_end(lambda: self._bind(self.kernel, self._fused))

    def __call__(self, x: TensorOrQuantized) -> torch.Tensor:
        """x: [..., this rank's in_features] -> [..., this rank's out_features]."""
        is_quantized = isinstance(x, QuantizedActivation)
        apply: Apply = self._apply_quantized if is_quantized else self._apply
        if self._reduce is None:
            return apply(x, self.weights, self.bias)
        y = self._reduce(apply(x, self.weights, None))
        return y if self.bias is None else y + self.bias

    def gated(self, x: TensorOrQuantized) -> torch.Tensor:
        """act(gate) * up, of the first and second half of the outputs: [..., this rank's out_features / 2]."""
        if isinstance(x, QuantizedActivation):
            if self._fuses_gating(x):
                return self._apply_gated_quantized(x, self.weights, self.bias)
        elif self._apply_gated is not None:
            return self._apply_gated(x, self.weights, self.bias)
        return self._activate(self(x))

    def gated_quantized_for(self, linear: Linear, x: TensorOrQuantized) -> TensorOrQuantized:
        """`gated`, as input for `linear` alone: quantized where both kernels can fuse the quantization."""
        if self._fuses_gating(x):
            return self.gated(x)
        y = self(x)
        fused = linear.fused_input_quantization(y) if linear.fuses_activation(self.spec.activation) else None
        return self._activate(y) if fused is None else fused.activate_and_quantize(y, linear.weights)

    def _fuses_gating(self, x: TensorOrQuantized) -> bool:
        """Whether the kernel multiplies and activates in one pass, as the faster way."""
        if self._apply_gated is None:
            return False
        if isinstance(x, QuantizedActivation):
            fused = self._fused_input_quantization
            return fused is not None and fused.fuses_quantized_gating(x)
        return self.kernel.fuses_gating(x.shape[0])

    gated_into = gated_quantized_for
    """The former name of `gated_quantized_for`, kept for older plugins."""

    def fused_input_quantization(self, x: torch.Tensor) -> FusedInputQuantization | None:
        """The kernel's FusedInputQuantization if it supports the rows of x, else None. x: [rows, any number]."""
        fused = self._fused_input_quantization
        return fused if fused is not None and x.dim() == 2 and fused.supports_rows(x.shape[0]) else None

    def fuses_activation(self, activation: Activation) -> bool:
        """Whether the kernel can fuse its input quantization into a gated layer with this activation."""
        return self._fuses_activation and activation == self.spec.input_activation

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The kernel's tensors, and NAME.bias of each part."""
        spec = self.spec
        shard_dim = BIAS_SHARD_DIM[spec.parallel]
        found = dict(self._kernel_tensors())
        if spec.bias:
            found |= {_bias(part): plain_tensor((part.out_features,), spec.dtype, shard_dim) for part in spec.parts}
        for part in spec.parts:
            if part.replicas > 1 or part.stored_in is not None:
                mine = {name for name in found if name.startswith(f"{part.name}.")}
                found |= {name: _of_part(name, found[name], part) for name in mine}
        return found

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Have the kernel prepare its tensors, and merge the biases."""
        biases = {_bias(part): loaded[_bias(part)] for part in self.spec.parts} if self.spec.bias else {}
        if biases and self._adds_bias:
            self.bias = merge(list(biases.values()), self.spec.dtype)
        self._prepare({name: loaded[name] for name in loaded if name not in biases})

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        if self.spec.exact_input:  # applied once, at load
            return ()
        with self._blame("autotuned_calls()"):
            return self.kernel.autotuned_calls(self.weights, self.bias if self._reduce is None else None)

    @property
    def nbytes(self) -> int:
        kept = list(self.weights.values()) + ([] if self.bias is None else [self.bias])
        return sum(tensor.nbytes for tensor in kept)

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        return compiled_shapes(*self.weights.values())


class PartialLinear:
    """A row-parallel linear layer without the reduction over ranks, which the next norm does."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        """linear: made without `reduce`; on one rank alone it adds its bias."""
        self.linear = linear
        self._group = group

    def __call__(self, x: TensorOrQuantized) -> PartialSum:
        """x: [..., this rank's in_features] -> [..., out_features]."""
        return PartialSum(self.linear(x), self._group)


def _refuse(
    spec: LinearSpec, x: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    raise TypeError(f"{spec.parts[0].name} takes tensors only; this activation was quantized for another layer")


def merge(tensors: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """Concatenate along the first dimension, in `dtype`; a single tensor of that dtype is not copied."""
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(torch_dtype(dtype))


def _of_part(name: str, spec: TensorSpec, part: LinearPart) -> TensorSpec:
    """The spec of a part's tensor, with the part's replicas and the tensor that it is stored in."""
    spec = evolve(spec, replicas=part.replicas)
    if part.stored_in is None:
        return spec
    start, size = 0, 0
    if spec.shard_dim is not None:
        units = spec.shape[spec.shard_dim]  # may be words or blocks of outputs
        start, size = part.stored_in.start * units, part.stored_in.size * units
        if units < 1 or start % part.out_features or size % part.out_features:
            raise CheckpointError(
                f"{part.stored_name} holds {part.name} among its outputs, but {name} packs outputs of several parts"
                " into one number or scale; use a checkpoint of another format"
            )
    stored = f"{part.stored_name}{name.removeprefix(part.name)}"
    return evolve(
        spec,
        stored_in=StoredIn(name=stored, start=start // part.out_features, size=size // part.out_features),
    )


def _weight(part: LinearPart) -> str:
    return f"{part.name}.weight"


def _bias(part: LinearPart) -> str:
    return f"{part.name}.bias"
