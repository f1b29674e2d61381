"""SmolLM3."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.errors import CheckpointError
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    layer_types,
    parse_decoder,
    read_window,
    windows_of,
    with_theta,
)

THETA = 2e6
"""rope_theta if config.json has no key for it."""
INTERVAL = 4
"""The last of every INTERVAL layers does not rotate, if config.json has no key for it."""


class SmolLM3(Decoder):
    """The decoder without rotary embedding in some layers, which may have sliding windows."""

    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    model_type: ClassVar[str] = "smollm3"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading(
            "attention_bias",
            "mlp_bias",
            "no_rope_layer_interval",
            "no_rope_layers",
            "use_sliding_window",
            nullable=("no_rope_layers",),
        )
        .ignoring("max_window_layers")
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """no_rope_layers: a number per layer, 0 where queries and keys are not rotated."""
        shape = parse_decoder(with_theta(config, THETA), tied=True)
        rotated = rotated_layers(config, shape.num_layers)
        window = read_window(config, None) if read_key(config, "use_sliding_window", bool, False) else None
        kinds = layer_types(config, shape.num_layers) or tuple(
            SLIDING if window is not None and not rotates else FULL for rotates in rotated
        )
        bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            shape,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=read_key(config, "mlp_bias", bool, False),
            ropes=tuple(rope if rotates else None for rope, rotates in zip(shape.ropes, rotated, strict=True)),
            sliding_windows=windows_of(kinds, window, "use_sliding_window or sliding_window is not set"),
        )


def rotated_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys. Raises CheckpointError for a list of another length."""
    stored = config.get("no_rope_layers")
    if stored is None:
        interval = read_key(config, "no_rope_layer_interval", int, INTERVAL, least=1)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(stored, list) or len(stored) != num_layers or any(one not in (0, 1) for one in stored):
        raise CheckpointError(
            f"config.json: no_rope_layers must have 0 or 1 for each of {num_layers} layers, not {stored!r}"
        )
    return tuple(bool(one) for one in stored)
