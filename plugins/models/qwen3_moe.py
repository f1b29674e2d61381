"""Qwen3 with experts, as Qwen3-30B-A3B (arXiv:2505.09388)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder
from engine.plugins.models.qwen2 import DEFAULT_WINDOW
from engine.plugins.models.sparse import SPARSE_KEYS, TRAINING_KEYS, parse_sparse


class Qwen3Moe(Decoder):
    """Qwen3 with experts in all layers or some, and perhaps a sliding window in all."""

    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading(*SPARSE_KEYS, "attention_bias", "use_sliding_window", nullable=("mlp_only_layers",))
        .ignoring(*TRAINING_KEYS, "max_window_layers")
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Requires head_dim: in these models it is not hidden_size / num_attention_heads."""
        read_key(config, "head_dim", int, least=1)
        attention_bias = read_key(config, "attention_bias", bool, False)
        shape = parse_decoder(config)
        window = None
        if read_key(config, "use_sliding_window", bool, False) and config.get("sliding_window", 0) is not None:
            window = read_key(config, "sliding_window", int, DEFAULT_WINDOW, least=1)
        return evolve(
            shape,
            qk_norm=True,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            sparse=parse_sparse(config, shape.num_layers, shape.activation),
            sliding_windows=(window,) * shape.num_layers,
        )
