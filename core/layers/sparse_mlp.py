"""The composite layer of a mixture of experts: input norm, router, experts, and perhaps an expert that all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from engine.core.distributed.partial_sum import PartialSum
from engine.core.layers.routing import RoutingSpec
from engine.core.quant.base import Activation

if TYPE_CHECKING:
    from engine.core.layers.experts import Experts
    from engine.core.layers.layer_factory import LayerFactory
    from engine.core.layers.linear import Linear, PartialLinear
    from engine.core.layers.norm import RMSNorm
    from engine.core.layers.routing import Router


@frozen(kw_only=True)
class SharedExpertSpec:
    """A gated MLP that computes every token next to the experts that are chosen."""

    name: str
    """Qualified name in the checkpoint, with gate_proj, up_proj and down_proj."""
    intermediate_size: int
    gate: str = ""
    """Name of the linear layer to one number per token, whose sigmoid multiplies the result. Empty: no gate."""


@frozen(kw_only=True)
class SparseMLPSpec:
    """A mixture of experts in place of an MLP. Names are those in the checkpoint; sizes are over all ranks."""

    norm: str
    eps: float
    """Epsilon of the norm."""
    router: str
    experts: str
    hidden_size: int
    intermediate_size: int
    """Intermediate size of each expert."""
    routing: RoutingSpec
    router_bias: bool = False
    activation: Activation = "silu"
    bias: bool = False
    """Whether the projections of experts have biases."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    """Whether stacked experts are transposed; see ExpertsSpec."""
    interleaved: bool = False
    """Whether stacked gate and up projections alternate; see ExpertsSpec."""
    stacked: bool = False
    """Whether the experts of random weights are stacked; a checkpoint is read as it is stored."""
    shared: SharedExpertSpec | None = None


class SharedExpert:
    """The gated MLP that all tokens share."""

    def __init__(self, gate_up: Linear, down: PartialLinear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One rank's addend of the result. x: [tokens, hidden_size] -> the same shape."""
        return self._down(self._gate_up.gated_quantized_for(self._down.linear, x)).addend


class SparseMLP:
    """Input norm, router, experts and the shared expert."""

    def __init__(self, norm: RMSNorm, router: Router, experts: Experts, shared: SharedExpert | None) -> None:
        self._norm = norm
        self._router = router
        self._experts = experts
        self._shared = shared

    @classmethod
    def make(cls, spec: SparseMLPSpec, layers: LayerFactory) -> SparseMLP:
        """Make the parts."""
        shared, gate = spec.shared, "" if spec.shared is None else spec.shared.gate
        norm = layers.norm(spec.norm, spec.hidden_size, spec.eps)
        router = layers.router(spec.router, spec.hidden_size, spec.routing, bias=spec.router_bias, shared_gate=gate)
        experts = layers.experts(
            spec.experts,
            spec.hidden_size,
            spec.intermediate_size,
            spec.routing.num_experts,
            spec.routing.top_k,
            activation=spec.activation,
            bias=spec.bias,
            projections=spec.projections,
            stacked=spec.stacked,
            transposed=spec.transposed,
            interleaved=spec.interleaved,
        )
        if shared is None:
            return cls(norm, router, experts, None)
        parts = [(f"{shared.name}.{one}", shared.intermediate_size) for one in ("gate_proj", "up_proj")]
        gate_up = layers.linear(parts, spec.hidden_size, parallel="column", gated=True, activation=spec.activation)
        down = layers.partial_linear(
            f"{shared.name}.down_proj", spec.hidden_size, shared.intermediate_size, input_activation=spec.activation
        )
        return cls(norm, router, experts, SharedExpert(gate_up, down))

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[PartialSum, torch.Tensor]:
        """The experts of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros.
        """
        x, residual, logits = self._norm.with_logits(self._router.linear, hidden, residual)
        routing, gate = self._router.choose(logits)
        result = self._experts(x, routing)
        if self._shared is not None:
            shared = self._shared(x)
            if gate is None:
                result.addend.add_(shared)
            else:
                result.addend.addcmul_(shared, gate.sigmoid())
        return result, residual
