"""Qwen3-MoE (arXiv:2505.09388): a mixture of experts in most layers, norms over each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.core.distributed import PartialSum
from engine.core.layers import (
    Angles,
    GatedMLP,
    LayerFactory,
    RotarySpec,
    RoutingSpec,
    SparseMLP,
    SparseMLPSpec,
    refuses_rope,
)
from engine.core.models import ForwardPass, Model, ModelSpec
from engine.core.weights import read_key

ARCHITECTURE = "Qwen3MoeForCausalLM"


class Qwen3Moe(Model):
    """The decoder of Qwen3MoeForCausalLM."""

    api = "2"

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        if ARCHITECTURE not in (config.get("architectures") or ()):
            return f"it builds {ARCHITECTURE}, and this checkpoint is {config.get('architectures')}"
        if config.get("hidden_act", "silu") != "silu":
            return f"it computes the activation silu only; config.json has {config['hidden_act']}"
        if not isinstance(config.get("mlp_only_layers") or [], list):
            return f"mlp_only_layers of config.json must be a list of layers, not {config['mlp_only_layers']}"
        return refuses_rope(config)

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        def number(key: str, default: int | None = None) -> int:
            return read_key(config, key, int, default, least=1)

        num_layers, num_heads, size = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
        head_dim, max_len = number("head_dim", size // num_heads), number("max_position_embeddings")
        rotary = RotarySpec.from_config(config, head_dim)
        window = number("sliding_window") if read_key(config, "use_sliding_window", bool, False) else None
        return ModelSpec(
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads"),
            head_dim=head_dim,
            hidden_size=size,
            vocab_size=number("vocab_size"),
            max_len=rotary.longest(max_len),
            extended_max_len=rotary.extended(max_len),
            sliding_windows=(window,) * num_layers,
            scale=head_dim**-0.5,
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        spec, eps = self.spec(config), read_key(config, "rms_norm_eps", float, 1e-6)
        self.embedding = layers.embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.rotary = layers.rotary(RotarySpec.from_config(config, spec.head_dim))
        self.layers = [DecoderLayer(index, config, spec, layers) for index in range(spec.num_layers)]
        self.norm = layers.norm("model.norm", spec.hidden_size, eps)
        tied = self.embedding if read_key(config, "tie_word_embeddings", bool, False) else None
        self.head = layers.lm_head("lm_head", spec.vocab_size, spec.hidden_size, tied)

    def forward(self, run: ForwardPass) -> torch.Tensor:
        angles = self.rotary.angles(run.batch.positions)
        hidden: torch.Tensor | PartialSum = self.embedding(run.batch.tokens)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(run, hidden, residual, angles)
        return self.norm(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.greedy(hidden)


class DecoderLayer:
    """Attention, and a mixture of experts or, where config.json says so, a gated MLP."""

    def __init__(self, index: int, config: Mapping[str, Any], spec: ModelSpec, layers: LayerFactory) -> None:
        name, size = f"model.layers.{index}", spec.hidden_size
        eps = read_key(config, "rms_norm_eps", float, 1e-6)
        bias = read_key(config, "attention_bias", bool, False)
        self.attention = layers.attention_block(
            index,
            f"{name}.self_attn",
            size,
            norm=f"{name}.input_layernorm",
            eps=eps,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
        )
        norm = f"{name}.post_attention_layernorm"
        self.mlp: SparseMLP | GatedMLP
        if _is_sparse(config, index):
            self.mlp = layers.sparse_mlp(
                SparseMLPSpec(
                    norm=norm,
                    eps=eps,
                    router=f"{name}.mlp.gate",
                    experts=f"{name}.mlp.experts",
                    hidden_size=size,
                    intermediate_size=read_key(config, "moe_intermediate_size", int, least=1),
                    routing=_routing(config),
                )
            )
        else:
            inner = read_key(config, "intermediate_size", int, least=1)
            self.mlp = layers.gated_mlp(f"{name}.mlp", size, inner, norm=norm, eps=eps)

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        hidden, residual = self.attention(run, hidden, residual, angles)
        return self.mlp(hidden, residual)


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer has a mixture of experts in place of an MLP."""
    step = read_key(config, "decoder_sparse_step", int, 1, least=1)
    return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _routing(config: Mapping[str, Any]) -> RoutingSpec:
    """How the experts of a token are chosen."""
    num_experts = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers writes either
    return RoutingSpec(
        num_experts=read_key(config, num_experts, int, least=1),
        top_k=read_key(config, "num_experts_per_tok", int, least=1),
        renormalize=read_key(config, "norm_topk_prob", bool, False),
    )
