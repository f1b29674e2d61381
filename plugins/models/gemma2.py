"""Gemma 2 (arXiv:2408.00118)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import (
    BlockNorms,
    DecoderConfig,
    alternating_types,
    parse_decoder,
    read_optional,
    read_window,
    windows_of,
)

DEFAULT_WINDOW = 4096
"""Sliding window if config.json has no key for it."""
KEYS = (
    ConfigKeys()
    .reading(
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        nullable=("attn_logit_softcapping", "final_logit_softcapping"),
    )
    .accepting(use_bidirectional_attention=(None, False))
    .ignoring("hidden_act")
)


class Gemma2(Decoder):
    """The decoder with norms before and after each block, all with an offset of 1, windows in every other layer, and
    capped scores and logits."""

    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    model_type: ClassVar[str] = "gemma2"
    activation: ClassVar[tuple[str, str]] = ("hidden_activation", "gelu_pytorch_tanh")
    keys: ClassVar[ConfigKeys] = KEYS

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """attn_logit_softcapping, final_logit_softcapping: a number; null: scores or logits are not capped."""
        shape = gemma_shape(config, cls.activation)
        kinds = alternating_types(config, shape.num_layers, lambda layer: layer % 2 == 1)
        return evolve(
            shape,
            sliding_windows=windows_of(kinds, read_window(config, DEFAULT_WINDOW), "sliding_window is null"),
            softcap=read_optional(config, "attn_logit_softcapping", 50.0),
            logit_softcap=read_optional(config, "final_logit_softcapping", 30.0),
        )


def gemma_shape(config: Mapping[str, Any], activation: tuple[str, str]) -> DecoderConfig:
    """What Gemma 2 and 3 share. Requires head_dim, which is not hidden_size / num_attention_heads."""
    read_key(config, "head_dim", int, least=1)
    shape = parse_decoder(config, activation=activation, tied=True)
    bias = read_key(config, "attention_bias", bool, False)
    return evolve(
        shape,
        qkv_bias=bias,
        output_bias=bias,
        norm_kind="rms_unit_offset",
        norms=BlockNorms(
            attention="input_layernorm",
            attention_output="post_attention_layernorm",
            mlp="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        scale=read_key(config, "query_pre_attn_scalar", float) ** -0.5,
        embedding_scale=shape.hidden_size**0.5,
    )
