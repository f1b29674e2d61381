"""Mistral 7B and its successors of the same type (arXiv:2310.06825)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.decoder import Decoder, DecoderConfig, parse_decoder

DEFAULT_WINDOW = 4096
"""Sliding window if config.json has no key for it, as in the first release. null: no window."""


class Mistral(Decoder):
    """The decoder with the same sliding window in all layers."""

    architecture: ClassVar[str] = "MistralForCausalLM"
    model_type: ClassVar[str] = "mistral"

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Also refuses layers with different windows, which are another architecture."""
        if len(set(config.get("layer_types") or ())) > 1:
            return "it has one sliding window for all layers, and this checkpoint's layer_types differ"
        return super().refuses(config)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """sliding_window: a number of tokens or null."""
        shape = parse_decoder(config)
        window = None
        if config.get("sliding_window", DEFAULT_WINDOW) is not None:
            window = read_key(config, "sliding_window", int, DEFAULT_WINDOW, least=1)
        return evolve(shape, sliding_windows=(window,) * shape.num_layers)
