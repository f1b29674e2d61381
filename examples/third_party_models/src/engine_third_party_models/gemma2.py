"""Gemma 2 (arXiv:2408.00118): a norm before and after each block, sliding windows, soft caps of scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.core.distributed import PartialSum
from engine.core.errors import CheckpointError
from engine.core.layers import Angles, LayerFactory, RotarySpec, refuses_rope
from engine.core.models import ForwardPass, Model, ModelSpec
from engine.core.weights import read_key

ARCHITECTURE = "Gemma2ForCausalLM"
ACTIVATION = "gelu_pytorch_tanh"
SLIDING, FULL = "sliding_attention", "full_attention"
"""Values of layer_types."""


class Gemma2(Model):
    """The decoder of Gemma2ForCausalLM."""

    api = "2"

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        if ARCHITECTURE not in (config.get("architectures") or ()):
            return f"it builds {ARCHITECTURE}, and this checkpoint is {config.get('architectures')}"
        if config.get("hidden_activation", ACTIVATION) != ACTIVATION:
            return f"it computes the activation {ACTIVATION} only; config.json has {config['hidden_activation']}"
        if config.get("use_bidirectional_attention"):
            return "it attends to earlier tokens only, and use_bidirectional_attention is set; use a causal checkpoint"
        if config.get("sliding_window", 0) is None:
            return "config.json has sliding_window: null, and layers with a window need its size; give it"
        return refuses_rope(config)

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        def number(key: str, default: int | None = None) -> int:
            return read_key(config, key, int, default, least=1)

        num_layers, head_dim = number("num_hidden_layers"), number("head_dim", 256)
        max_len = number("max_position_embeddings")
        rotary = RotarySpec.from_config(config, head_dim)
        return ModelSpec(
            num_layers=num_layers,
            num_heads=number("num_attention_heads"),
            num_kv_heads=number("num_key_value_heads"),
            head_dim=head_dim,
            hidden_size=number("hidden_size"),
            vocab_size=number("vocab_size"),
            max_len=rotary.longest(max_len),
            extended_max_len=rotary.extended(max_len),
            sliding_windows=_sliding_windows(config, num_layers),
            scale=read_key(config, "query_pre_attn_scalar", float, 256.0, least=1) ** -0.5,
            softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        spec, eps = self.spec(config), read_key(config, "rms_norm_eps", float, 1e-6)
        size = spec.hidden_size
        self.embedding = layers.embedding("model.embed_tokens", spec.vocab_size, size, scale=size**0.5)
        self.rotary = layers.rotary(RotarySpec.from_config(config, spec.head_dim))
        self.layers = [DecoderLayer(index, config, spec, layers) for index in range(spec.num_layers)]
        self.norm = layers.norm("model.norm", size, eps, "rms_unit_offset")
        tied = self.embedding if read_key(config, "tie_word_embeddings", bool, True) else None
        softcap = _softcap(config, "final_logit_softcapping", 30.0)
        self.head = layers.lm_head("lm_head", spec.vocab_size, size, tied, softcap=softcap)

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
    """Attention and MLP, each with a norm of its input and one of its result."""

    def __init__(self, index: int, config: Mapping[str, Any], spec: ModelSpec, layers: LayerFactory) -> None:
        name, size = f"model.layers.{index}", spec.hidden_size
        eps = read_key(config, "rms_norm_eps", float, 1e-6)
        bias = read_key(config, "attention_bias", bool, False)
        self.attention = layers.attention_block(
            index,
            f"{name}.self_attn",
            size,
            norm=f"{name}.input_layernorm",
            output_norm=f"{name}.post_attention_layernorm",
            norm_kind="rms_unit_offset",
            eps=eps,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=bias,
            output_bias=bias,
        )
        self.mlp = layers.gated_mlp(
            f"{name}.mlp",
            size,
            read_key(config, "intermediate_size", int, least=1),
            norm=f"{name}.pre_feedforward_layernorm",
            output_norm=f"{name}.post_feedforward_layernorm",
            norm_kind="rms_unit_offset",
            eps=eps,
            activation="gelu_tanh",
        )

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        hidden, residual = self.attention(run, hidden, residual, angles)
        return self.mlp(hidden, residual)


def _sliding_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: of every other layer, the first included, unless layer_types says otherwise."""
    types = config.get("layer_types") or [SLIDING if index % 2 == 0 else FULL for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {SLIDING, FULL}:
        raise CheckpointError(f"config.json: layer_types must be {num_layers} times {SLIDING} or {FULL}, not {types}")
    window = read_key(config, "sliding_window", int, 4096, least=1)
    return tuple(window if one == SLIDING else None for one in types)


def _softcap(config: Mapping[str, Any], key: str, default: float) -> float | None:
    """The soft cap under `key`; None if config.json has null there."""
    return None if config.get(key, default) is None else read_key(config, key, float, default, least=1e-6)
