"""OLMo 3."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.layers import RotarySpec
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    alternating_types,
    read_window,
    rope_config,
    windows_of,
)
from engine.plugins.models.olmo2 import Olmo2

DEFAULT_WINDOW = 4096
"""Sliding window if config.json has no key for it."""
PATTERN = 4
"""The last of every PATTERN layers has full attention, if config.json has no key for it."""
THETA = 500000.0
"""rope_theta if config.json has no key for it; of layers with windows in files without rope parameters by kind."""


class Olmo3(Olmo2):
    """OLMo 2 with sliding windows in most layers, which do not share the rope scaling of the others."""

    architecture: ClassVar[str] = "Olmo3ForCausalLM"
    model_type: ClassVar[str] = "olmo3"
    keys: ClassVar[ConfigKeys] = Olmo2.keys.with_ropes_by_type()

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """rope_scaling of older files is that of layers with full attention."""
        shape = super().parse(rope_config(config, FULL, config.get("rope_theta") or THETA))
        sliding = RotarySpec.from_config(rope_config(config, SLIDING, THETA), shape.head_dim)
        ropes = {FULL: shape.ropes[0], SLIDING: sliding}
        kinds = alternating_types(config, shape.num_layers, lambda layer: (layer + 1) % PATTERN == 0)
        return evolve(
            shape,
            ropes=tuple(ropes[kind] for kind in kinds),
            sliding_windows=windows_of(kinds, read_window(config, DEFAULT_WINDOW), "sliding_window is null"),
        )
