"""Qwen3, the dense models (arXiv:2505.09388)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder
from engine.plugins.models.qwen2 import WINDOW_KEYS, layer_windows


class Qwen3(Decoder):
    """The decoder with a norm over each head of queries and keys; sliding windows as in Qwen2."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading("attention_bias", *WINDOW_KEYS)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Requires head_dim: in most of these models it is not hidden_size / num_attention_heads."""
        read_key(config, "head_dim", int, least=1)
        attention_bias = read_key(config, "attention_bias", bool, False)
        shape = parse_decoder(config)
        return evolve(
            shape,
            qk_norm=True,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            sliding_windows=layer_windows(config, shape.num_layers),
        )
