"""GLM-4 of April 2025 (0414), the dense models."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import BlockNorms, DecoderConfig, parse_decoder

PARTIAL = 0.5
"""Part of each head that rotates, if config.json has no key for it."""


class Glm4(Decoder):
    """The decoder with norms before and after each block, biases on queries, keys and values, and a rotary embedding
    that pairs adjacent dimensions of a part of each head."""

    architecture: ClassVar[str] = "Glm4ForCausalLM"
    model_type: ClassVar[str] = "glm4"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading("attention_bias", "partial_rotary_factor")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Requires head_dim, whose default is not hidden_size / num_attention_heads."""
        read_key(config, "head_dim", int, least=1)
        return evolve(
            parse_decoder({"partial_rotary_factor": PARTIAL, **config}, interleaved=True),
            qkv_bias=read_key(config, "attention_bias", bool, True),
            norms=BlockNorms(
                attention="input_layernorm",
                attention_output="post_self_attn_layernorm",
                mlp="post_attention_layernorm",
                mlp_output="post_mlp_layernorm",
            ),
            fused_gate_up="gate_up_proj",
        )
