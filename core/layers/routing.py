"""The router of a mixture of experts: chooses the experts of each token, and the factors of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.quant.experts import Routing

if TYPE_CHECKING:
    from engine.core.layers.linear import Linear

Scoring = Literal["softmax", "sigmoid"]
"""How logits become scores: softmax over all experts, or the sigmoid of each."""


@frozen(kw_only=True)
class RoutingSpec:
    """How experts are chosen by the router's logits: the `top_k` with the largest scores, of equal ones the first.

    A softmax over the chosen logits alone is a softmax over all, renormalized. Raises CheckpointError unless `top_k` is
    between 1 and `num_experts`.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    """Whether each token's factors are divided by their sum."""
    scale: float = 1.0
    """Multiplies the factors, last."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(
                f"config.json asks for {self.top_k} experts per token, and a layer has {self.num_experts};"
                " fetch the file again"
            )


Route = Callable[[torch.Tensor, RoutingSpec, range], Routing]
"""Logits [tokens, num_experts], the spec and this rank's experts -> the routing."""


def route(logits: torch.Tensor, spec: RoutingSpec, rank_experts: range) -> Routing:
    """Route by torch operations, in float32. A Route."""
    scores = logits.float()
    scores = scores.softmax(-1) if spec.scoring == "softmax" else scores.sigmoid()
    order = scores.argsort(dim=-1, descending=True, stable=True)  # topk may take any of equal scores
    experts = order[:, : spec.top_k]
    weights = scores.gather(1, experts)
    if spec.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if spec.scale != 1.0:
        weights = weights * spec.scale
    if len(rank_experts) < spec.num_experts:
        experts = experts - rank_experts.start
        experts = experts.masked_fill((experts < 0) | (experts >= len(rank_experts)), -1)
    return Routing(experts.to(torch.int32), weights)


class Router:
    """The router's linear layer, never quantized, and the choice of experts."""

    def __init__(self, linear: Linear, spec: RoutingSpec, rank_experts: range, route: Route, has_gate: bool) -> None:
        """linear: to a logit per expert and, with `has_gate`, one more, of the shared expert's gate."""
        self.linear = linear
        self._spec = spec
        self._rank_experts = rank_experts
        self._route = route
        self._has_gate = has_gate

    def __call__(self, x: torch.Tensor) -> tuple[Routing, torch.Tensor | None]:
        """x: [tokens, hidden_size] -> the routing, and the logit of the shared expert's gate, [tokens, 1], if any."""
        return self.choose(self.linear(x))

    def choose(self, logits: torch.Tensor) -> tuple[Routing, torch.Tensor | None]:
        """As the call, of what `linear` returned."""
        if not self._has_gate:
            return self._route(logits, self._spec, self._rank_experts), None
        size = self._spec.num_experts
        return self._route(logits[:, :size], self._spec, self._rank_experts), logits[:, size:]
