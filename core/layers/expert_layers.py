"""The part of LayerFactory that makes routers and experts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attrs import evolve

from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers.experts import Experts
from engine.core.layers.former_prefixes import FormerPrefixes, best_answer
from engine.core.layers.routing import Router, RoutingSpec
from engine.core.plugin_host.faults import blame, expect
from engine.core.quant.base import Activation, LinearPart, QuantMethod, TensorSpec, stored_tensor
from engine.core.quant.experts import ExpertsKernel, ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.layer_classes import LayerClasses
    from engine.core.layers.linear import Linear

log = logging.getLogger(__name__)


class ExpertLayers:
    """Makes routers and experts. A mixin of LayerFactory, which sets the attributes below."""

    dtype: str
    """Of activations: float32, bfloat16 or float16."""
    device: str
    rank: int
    ranks: int
    """Number of ranks that share the model."""
    expert_parallel: bool
    """Whether each rank has some whole experts of a layer, instead of a shard of each."""
    _group: RankGroup
    _quant: QuantMethod[Any] | None
    _quant_owner: str
    _classes: LayerClasses
    _prefixes: FormerPrefixes
    _has_warned = False
    if TYPE_CHECKING:
        shard: Callable[[int, str], int]
        stores: Callable[[str], bool | None]
        stores_tensor: Callable[[str], bool | None]
        _linear: Callable[..., Linear]
        _record: Callable[[Experts], Experts]

    def router(
        self, name: str, hidden_size: int, spec: RoutingSpec, *, bias: bool = False, shared_gate: str = ""
    ) -> Router:
        """The router of a mixture of experts, whole on every rank and never quantized.

        shared_gate: name of the linear layer to the gate of a shared expert; empty: none.
        """
        names = [(name, spec.num_experts), *([(shared_gate, 1)] if shared_gate else [])]
        parts = tuple(LinearPart(name=one, out_features=outputs) for one, outputs in names)
        linear = self._linear(parts, hidden_size, bias=bias, parallel="none", quantized=False)
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
            self.shard(intermediate_size, f"intermediate features of {name} (with --expert-parallel they can)")
        is_stacked = self.stores(name)
        spec = ExpertsSpec(
            name=self._prefixes.stored(name),
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
        return self._record(Experts(spec, kernel, self._group, owner=self._quant_owner))

    def _experts_kernel(self, spec: ExpertsSpec) -> tuple[ExpertsSpec, ExpertsKernel]:
        """The quantization method's kernel of a layer's experts, else core's own, and the spec with the names that the
        kernel has."""
        present = evolve(spec, name=self._prefixes.present(spec.name))
        specs = [spec] if present == spec else [spec, present]
        spec, kernel = best_answer(
            specs,
            self._ask_experts,
            lambda one, kernel: self._has_quantized(
                Experts(one, kernel, self._group, owner=self._quant_owner).tensors()
            ),
        )
        if kernel is not None:
            if spec.activation not in kernel.activations:
                raise ConfigError(
                    f"{self._quant_owner} computes experts with {', '.join(kernel.activations)}, and this model's"
                    f" experts have {spec.activation}; choose another method, or an unquantized checkpoint"
                )
            return spec, kernel
        if self._quant is not None and type(self._quant).experts is QuantMethod.experts:
            self._warn_of_plain_experts(self._quant, spec)
        plain = self._classes.experts_kernel(spec)
        missing = [name for name in plain.tensors() if self.stores_tensor(name) is False]
        if missing:
            raise CheckpointError(
                f"{self._quant_owner} leaves the experts {spec.name} unquantized, and the checkpoint has no"
                f" {missing[0]}: its experts may be quantized; choose a method that reads them or another checkpoint"
            )
        return spec, plain

    def _ask_experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """The kernel that the quantization method makes. None: the experts are not quantized."""
        if self._quant is None:
            return None
        with blame(self._quant_owner, f"experts() of {spec.name}"):
            kernel = self._quant.experts(spec)
        right = kernel is None or isinstance(kernel, ExpertsKernel)
        expect(right, self._quant_owner, f"experts() of {spec.name}", kernel, "an ExpertsKernel or None")
        return kernel

    def _has_quantized(self, tensors: Mapping[str, TensorSpec]) -> bool:
        """Whether the checkpoint has the tensors of a quantized layer: all that are not optional, and at least one that
        an unquantized layer does not have."""
        optional = {stored_tensor(name, spec): spec.optional for name, spec in tensors.items()}
        stored = {name for name in optional if self.stores_tensor(name)}
        return any(not name.endswith((".weight", ".bias")) for name in stored) and all(
            is_optional or name in stored for name, is_optional in optional.items()
        )

    def _warn_of_plain_experts(self, quant: QuantMethod[Any], spec: ExpertsSpec) -> None:
        """Log, once, that a method without `experts` quantizes linear layers alone."""
        if not self._has_warned:
            with blame(self._quant_owner, f"linear() of {spec.name}"):
                self._has_warned = quant.linear(spec.linears(0)[0]) is not None
            if self._has_warned:
                log.warning(
                    "%s quantizes linear layers but not experts, which stay in %s", self._quant_owner, self.dtype
                )

    def _rank_experts(self, num_experts: int) -> range:
        """This rank's experts."""
        if not self.expert_parallel:
            return range(num_experts)
        count = self.shard(num_experts, "experts")
        return range(self.rank * count, (self.rank + 1) * count)
