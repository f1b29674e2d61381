"""OLMo 2 (arXiv:2501.00656)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import BlockNorms, DecoderConfig, parse_decoder


class Olmo2(Decoder):
    """The decoder with norms after each block instead of before, and norms over all queries and all keys together."""

    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    model_type: ClassVar[str] = "olmo2"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading("attention_bias")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """attention_bias applies to all four projections of attention."""
        bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            parse_decoder(config),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="projection",
            norms=BlockNorms(
                attention="",
                attention_output="post_attention_layernorm",
                mlp="",
                mlp_output="post_feedforward_layernorm",
            ),
        )
