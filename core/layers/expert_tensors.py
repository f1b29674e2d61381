"""Reads the tensors of experts from either layout of checkpoints: a module per expert, or all experts stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import evolve

from engine.core.quant.base import LinearSpec, TensorSpec
from engine.core.quant.experts import ExpertsSpec

TensorsOf = Callable[[LinearSpec], Mapping[str, TensorSpec]]
"""The tensors of a linear layer, as `LinearKernel.tensors` returns them."""


class ExpertTensors:
    """The tensors of all experts, given the tensors of a linear layer.

    In the stacked layout tensor NAME.3.down_proj.END is a part of NAME.down_proj_END; of an END that begins with
    weight, that word is left out, as in NAME.down_proj and NAME.down_proj_scale_inv.
    """

    def __init__(self, spec: ExpertsSpec, tensors_of: TensorsOf) -> None:
        """tensors_of: called with `ExpertsSpec.linears` of each expert. In stacked tensors, the first dimension of each
        expert's part must be the outputs."""
        self._spec = spec
        self._tensors_of = tensors_of

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors to read, by qualified name in the checkpoint's layout."""
        return self._stacked_specs() if self._spec.stacked else self._module_specs()

    def of_expert(self, loaded: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        """The tensors of this rank's expert number `index`, named as in a module per expert. Stacked: views.

        loaded: the tensors that `specs` names.
        """
        spec = self._spec
        names = [name for linear in spec.linears(spec.rank_experts[index]) for name in self._tensors_of(linear)]
        if not spec.stacked:
            return {name: loaded[name] for name in names if name in loaded}
        found = {}
        for name in names:
            projection, _, end = name.removeprefix(f"{spec.name}.{spec.rank_experts[index]}.").partition(".")
            stacked = loaded.get(self._stacked_name(projection, end))
            if stacked is not None:
                found[name] = self._part(stacked[index], projection)
        return found

    def _module_specs(self) -> dict[str, TensorSpec]:
        spec = self._spec
        found: dict[str, TensorSpec] = {}
        for expert in range(spec.num_experts):
            tensors = {name: one for linear in spec.linears(expert) for name, one in self._tensors_of(linear).items()}
            if spec.parallel == "expert" and spec.ranks > 1:
                owner = expert // (spec.num_experts // spec.ranks)
                tensors = {name: evolve(one, only_rank=owner) for name, one in tensors.items()}
            found |= tensors
        return found

    def _stacked_specs(self) -> dict[str, TensorSpec]:
        spec = self._spec
        found: dict[str, TensorSpec] = {}
        for linear in spec.linears(0):
            for name, one in self._tensors_of(linear).items():
                projection, _, end = name.removeprefix(f"{spec.name}.0.").partition(".")
                if projection != spec.projections[1]:  # gate and up are one tensor
                    found[self._stacked_name(projection, end)] = self._stack(one, projection != spec.projections[2])
        return found

    def _stack(self, one: TensorSpec, is_gate_up: bool) -> TensorSpec:
        """The spec of the stacked tensor that holds `one` for every expert."""
        spec = self._spec
        shape, dim, parts = list(one.shape), one.shard_dim, 1
        if is_gate_up:
            parts = 1 if spec.interleaved or dim != 0 else 2
            shape[0] *= 2
        if self._is_transposed(len(shape)):
            shape.reverse()
            dim = None if dim is None else 1 - dim
        dim = None if dim is None else dim + 1
        if spec.parallel == "expert":
            dim, parts = 0, 1
        return evolve(one, shape=(spec.num_experts, *shape), shard_dim=dim, shard_parts=parts)

    def _stacked_name(self, projection: str, end: str) -> str:
        whole = "down_proj" if projection == self._spec.projections[2] else "gate_up_proj"
        rest = end.removeprefix("weight").removeprefix("_")
        return f"{self._spec.name}.{whole}_{rest}" if rest else f"{self._spec.name}.{whole}"

    def _part(self, tensor: torch.Tensor, projection: str) -> torch.Tensor:
        """One projection of one expert's part of a stacked tensor."""
        gate, _, down = self._spec.projections
        if self._is_transposed(tensor.dim()):
            tensor = tensor.T
        if projection == down:
            return tensor
        if self._spec.interleaved:
            return tensor[int(projection != gate) :: 2]
        half = tensor.shape[0] // 2
        return tensor[:half] if projection == gate else tensor[half:]

    def _is_transposed(self, dims: int) -> bool:
        return self._spec.transposed and dims == 2
