"""Decoders with a mixture of experts in place of some layers' MLP: the experts that a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory, RoutingSpec, SharedExpertSpec, SparseMLP, SparseMLPSpec
from engine.core.quant import Activation
from engine.core.weights import read_key

SPARSE_KEYS = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
)
"""Keys that `parse_sparse` reads."""
TRAINING_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Keys of mixtures of experts that change no logits."""


@frozen(kw_only=True)
class SparseConfig:
    """The mixture of experts of a model's sparse layers, which are alike."""

    layers: frozenset[int]
    """The sparse layers."""
    routing: RoutingSpec
    intermediate_size: int
    """Of each expert."""
    modules: tuple[str, ...] = ("mlp",)
    """Names of the module that a checkpoint may have, the published one first."""
    router: str = "gate"
    router_bias: bool = False
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    activation: Activation = "silu"
    bias: bool = False
    stacked: bool = False
    """Whether published checkpoints stack the experts."""
    transposed: bool = False
    interleaved: bool = False
    shared_intermediate_size: int = 0
    """Of the shared expert. 0: there is none."""
    shared: str = "shared_expert"
    """Name of the shared expert in the module."""
    shared_gate: str = "shared_expert_gate"
    """Name of the gate of the shared expert's result. Empty: the result is not gated."""

    def make(self, layer: str, layers: LayerFactory, hidden_size: int, eps: float) -> SparseMLP:
        """The mixture of experts of one layer. layer: its name in the checkpoint, as model.layers.0."""
        stored = [one for one in self.modules if layers.stores(f"{layer}.{one}.{self.router}")]
        name = f"{layer}.{stored[0] if stored else self.modules[0]}"
        shared = None
        if self.shared_intermediate_size:
            shared = SharedExpertSpec(
                name=f"{name}.{self.shared}",
                intermediate_size=self.shared_intermediate_size,
                gate=f"{name}.{self.shared_gate}" if self.shared_gate else "",
            )
        return layers.sparse_mlp(
            SparseMLPSpec(
                norm=f"{layer}.post_attention_layernorm",
                eps=eps,
                router=f"{name}.{self.router}",
                experts=f"{name}.experts",
                hidden_size=hidden_size,
                intermediate_size=self.intermediate_size,
                routing=self.routing,
                router_bias=self.router_bias,
                activation=self.activation,
                bias=self.bias,
                projections=self.projections,
                stacked=self.stacked,
                transposed=self.transposed,
                interleaved=self.interleaved,
                shared=shared,
            )
        )


def parse_sparse(config: Mapping[str, Any], num_layers: int, activation: Activation) -> SparseConfig:
    """Read the keys of Qwen's mixtures of experts. Raises CheckpointError if one is missing or out of range."""
    step = read_key(config, "decoder_sparse_step", int, 1, least=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of numbers of layers")
    return SparseConfig(
        layers=frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        routing=routing_spec(config, renormalize=read_key(config, "norm_topk_prob", bool, False)),
        intermediate_size=read_key(config, "moe_intermediate_size", int, least=1),
        activation=activation,
    )


def routing_spec(config: Mapping[str, Any], *, renormalize: bool) -> RoutingSpec:
    """The softmax routing of num_experts (or num_local_experts, its other name) and num_experts_per_tok."""
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    num_experts = read_key(config, key, int, least=1)
    top_k = read_key(config, "num_experts_per_tok", int, least=1)
    if top_k > num_experts:
        raise CheckpointError(f"config.json: num_experts_per_tok ({top_k}) is more than {key} ({num_experts})")
    return RoutingSpec(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
