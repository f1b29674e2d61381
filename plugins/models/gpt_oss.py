"""gpt-oss (openai/gpt-oss on GitHub)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, windows_by_type, with_rope, with_theta
from engine.plugins.models.sparse import TRAINING_KEYS, SparseConfig, routing_spec

WINDOW = 128
"""Sliding window if config.json has no key for it."""
ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rope parameters if config.json has no table of them."""
THETA = 150000.0
"""rope_theta if config.json has no key for it."""


class GptOss(Decoder):
    """The decoder with biases, attention sinks, a window in every other layer, and stacked experts in all layers."""

    architecture: ClassVar[str] = "GptOssForCausalLM"
    model_type: ClassVar[str] = "gpt_oss"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("attention_bias", "num_experts_per_tok", "num_local_experts")
        .accepting(swiglu_alpha=(1.702,), swiglu_limit=(7.0, 7))
        .ignoring(*TRAINING_KEYS, "experts_per_token", "initial_context_length")
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Without layer_types, layers 0, 2, 4 and so on have the window."""
        shape = parse_decoder(with_theta(with_rope(config, ROPE), THETA))
        window = read_key(config, "sliding_window", int, WINDOW, least=1)
        windows = windows_by_type(config, shape.num_layers, window, "sliding_window is null")
        bias = read_key(config, "attention_bias", bool, True)
        sparse = SparseConfig(
            layers=frozenset(range(shape.num_layers)),
            routing=routing_spec(config, renormalize=True),
            intermediate_size=shape.intermediate_size,
            router="router",
            router_bias=True,
            activation="swiglu_oai",
            bias=True,
            stacked=True,
            transposed=True,
            interleaved=True,
        )
        return evolve(
            shape,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
            sparse=sparse,
            sliding_windows=windows or tuple(None if layer % 2 else window for layer in range(shape.num_layers)),
        )
