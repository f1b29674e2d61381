"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, windows_by_type
from engine.plugins.models.qwen2 import DEFAULT_WINDOW, WINDOW_KEYS
from engine.plugins.models.sparse import SPARSE_KEYS, TRAINING_KEYS, parse_sparse


class Qwen2Moe(Decoder):
    """Qwen2 with experts, and a gated expert that all tokens share, in all layers or some."""

    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"
    model_type: ClassVar[str] = "qwen2_moe"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading(
            *SPARSE_KEYS, *WINDOW_KEYS, "qkv_bias", "shared_expert_intermediate_size", nullable=("mlp_only_layers",)
        )
        .ignoring(*TRAINING_KEYS)
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        shape = parse_decoder(config)
        sparse = evolve(
            parse_sparse(config, shape.num_layers, shape.activation),
            shared_intermediate_size=read_key(config, "shared_expert_intermediate_size", int, least=1),
        )
        return evolve(
            shape,
            qkv_bias=read_key(config, "qkv_bias", bool, True),
            sparse=sparse,
            sliding_windows=_windows(config, shape.num_layers),
        )


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: by layer_types, or in every other layer below max_window_layers."""
    window = None
    if read_key(config, "use_sliding_window", bool, False):
        window = read_key(config, "sliding_window", int, DEFAULT_WINDOW, least=1)
    by_type = windows_by_type(config, num_layers, window, "use_sliding_window is not set")
    if by_type is not None or window is None:
        return by_type or (None,) * num_layers
    end = read_key(config, "max_window_layers", int)
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(num_layers))
