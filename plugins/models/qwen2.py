"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.errors import CheckpointError
from engine.core.weights import read_key
from engine.plugins.models.decoder import Decoder, DecoderConfig, parse_decoder

LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen2(Decoder):
    """The decoder with biases on queries, keys and values, and sliding windows on the upper layers if asked for."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Queries, keys and values always have biases."""
        shape = parse_decoder(config)
        return evolve(shape, qkv_bias=True, sliding_windows=layer_windows(config, shape.num_layers))


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: by layer_types, or from layer max_window_layers on.

    Raises CheckpointError if a layer has a window without a size.
    """
    if not read_key(config, "use_sliding_window", bool, False) or config.get("sliding_window") is None:
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise CheckpointError(
                "config.json: layer_types has sliding_attention, but use_sliding_window or sliding_window is not set"
            )
        return (None,) * num_layers
    window = read_key(config, "sliding_window", int, least=1)
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = read_key(config, "max_window_layers", int)
        return tuple(None if layer < first else window for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(LAYER_TYPES):
        raise CheckpointError(
            f"config.json: layer_types must name {' or '.join(LAYER_TYPES)} for each of {num_layers} layers,"
            f" not {layer_types!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
