"""The part of LayerFactory that makes routers and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.errors import CheckpointError
from engine.core.layers.experts import Experts
from engine.core.layers.routing import Router, RoutingSpec
from engine.core.quant.base import Activation, LinearPart
from engine.core.quant.experts import ExpertsKernel, ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.base import Layer
    from engine.core.layers.checkpoint_names import CheckpointNames
    from engine.core.layers.layer_classes import LayerClasses
    from engine.core.layers.linear_layers import LinearLayers
    from engine.core.layers.quant_kernels import QuantKernels
    from engine.core.layers.rank_shards import RankShards


class ExpertLayers:
    """Makes routers and experts. A mixin of LayerFactory, which sets the attributes below."""

    dtype: str
    """dtype of activations: float32, bfloat16 or float16."""
    device: str
    rank: int
    ranks: int
    """Number of ranks that share the model."""
    expert_parallel: bool
    """Whether each rank has some whole experts of a layer, instead of a shard of each."""
    _group: RankGroup
    _classes: LayerClasses
    _names: CheckpointNames
    _shards: RankShards
    _quant_kernels: QuantKernels
    _linear_layers: LinearLayers
    _record: Callable[[Layer], object]

    def router(
        self, name: str, hidden_size: int, spec: RoutingSpec, *, bias: bool = False, shared_gate: str = ""
    ) -> Router:
        """The router of a mixture of experts, whole on every rank and never quantized.

        shared_gate: name of the linear layer to the gate of a shared expert; empty: none.
        """
        names = [(name, spec.num_experts), *([(shared_gate, 1)] if shared_gate else [])]
        parts = tuple(LinearPart(name=one, out_features=outputs) for one, outputs in names)
        linear = self._linear_layers.make(parts, hidden_size, bias=bias, parallel="none", quantized=False)
        self._record(linear)
        return Router(
            linear, spec, self._rank_experts(spec.num_experts), self._classes.route, has_gate=bool(shared_gate)
        )

    def experts(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        stacked: bool = False,
        transposed: bool = False,
        interleaved: bool = False,
    ) -> Experts:
        """The experts of a layer, shared by ranks: by intermediate size, or by experts with expert parallelism.

        name: of the module in the checkpoint. stacked: the layout of random weights; a checkpoint has its own. The
        other arguments are those of ExpertsSpec.
        """
        by_expert = self.expert_parallel and self.ranks > 1
        self._rank_experts(num_experts)
        if not by_expert:
            self._shards.shard(intermediate_size, f"intermediate features of {name} (with --expert-parallel they can)")
        is_stacked = self._names.has_module(name)
        spec = ExpertsSpec(
            name=self._names.stored(name),
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=self.dtype,
            device=self.device,
            activation=activation,
            bias=bias,
            projections=projections,
            stacked=stacked if is_stacked is None else is_stacked,
            transposed=transposed,
            interleaved=interleaved,
            parallel="expert" if by_expert else "tensor",
            rank=self.rank,
            ranks=self.ranks,
        )
        spec, kernel = self._experts_kernel(spec)
        made = Experts(spec, kernel, self._group, owner=self._quant_kernels.owner)
        self._record(made)
        return made

    def _experts_kernel(self, spec: ExpertsSpec) -> tuple[ExpertsSpec, ExpertsKernel]:
        """The quantization method's kernel of a layer's experts, else core's own, and the spec with the names that the
        kernel has."""
        spec, kernel = self._quant_kernels.experts(spec, self._group)
        if kernel is not None:
            return spec, kernel
        plain = self._classes.experts_kernel(spec)
        missing = [name for name in plain.tensors() if self._names.has_tensor(name) is False]
        if missing:
            raise CheckpointError(
                f"{self._quant_kernels.owner} leaves the experts {spec.name} unquantized, and the checkpoint has no"
                f" {missing[0]}: its experts may be quantized; choose a method that reads them or another checkpoint"
            )
        return spec, plain

    def _rank_experts(self, num_experts: int) -> range:
        """This rank's experts."""
        if not self.expert_parallel:
            return range(num_experts)
        count = self._shards.shard(num_experts, "experts")
        return range(self.rank * count, (self.rank + 1) * count)
