"""Granite 3, the dense models."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder


class Granite(Decoder):
    """The decoder with factors on embeddings, blocks, attention scores and logits."""

    architecture: ClassVar[str] = "GraniteForCausalLM"
    model_type: ClassVar[str] = "granite"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading(
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "mlp_bias",
        "residual_multiplier",
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """attention_multiplier takes the place of head_dim ** -0.5, with 1 as its default. logits_scaling divides."""
        bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            parse_decoder(config),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=read_key(config, "mlp_bias", bool, False),
            scale=read_key(config, "attention_multiplier", float, 1.0),
            embedding_scale=read_key(config, "embedding_multiplier", float, 1.0),
            residual_scale=read_key(config, "residual_multiplier", float, 1.0),
            logit_scale=1.0 / read_key(config, "logits_scaling", float, 1.0, least=1e-6),
        )
