"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, windows_by_type

DEFAULT_WINDOW = 4096
"""Sliding window if use_sliding_window is set and config.json lacks sliding_window."""
WINDOW_KEYS = ("max_window_layers", "use_sliding_window")


class Qwen2(Decoder):
    """The decoder with biases on queries, keys and values, and sliding windows on the upper layers if asked for."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading(*WINDOW_KEYS)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Queries, keys and values always have biases."""
        shape = parse_decoder(config)
        return evolve(shape, qkv_bias=True, sliding_windows=layer_windows(config, shape.num_layers))


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: by layer_types, or from layer max_window_layers on.

    Raises CheckpointError if a layer has a window without a size.
    """
    window = None
    if read_key(config, "use_sliding_window", bool, False) and config.get("sliding_window", 0) is not None:
        window = read_key(config, "sliding_window", int, DEFAULT_WINDOW, least=1)
    by_type = windows_by_type(config, num_layers, window, "use_sliding_window or sliding_window is not set")
    if by_type is not None:
        return by_type
    if window is None:
        return (None,) * num_layers
    first = read_key(config, "max_window_layers", int)
    return tuple(None if layer < first else window for layer in range(num_layers))
