"""Mistral 7B and its successors of the same type (arXiv:2310.06825)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, read_window, windows_by_type

DEFAULT_WINDOW = 4096
"""Sliding window if config.json has no key for it, as in the first release. null: no window."""


class Mistral(Decoder):
    """The decoder with a sliding window in all layers, or in those that layer_types names."""

    architecture: ClassVar[str] = "MistralForCausalLM"
    model_type: ClassVar[str] = "mistral"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """sliding_window: a number of tokens or null."""
        shape = parse_decoder(config)
        window = read_window(config, DEFAULT_WINDOW)
        by_type = windows_by_type(config, shape.num_layers, window, "sliding_window is null")
        return evolve(shape, sliding_windows=by_type or (window,) * shape.num_layers)
