"""Gemma 3, the language model (arXiv:2503.19786)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.layers import RotarySpec
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    alternating_types,
    read_optional,
    read_window,
    rope_config,
    windows_of,
)
from engine.plugins.models.gemma2 import DEFAULT_WINDOW, KEYS, gemma_shape

PATTERN = 6
"""The last of every PATTERN layers has full attention, if config.json has no key for it."""
THETA, LOCAL_THETA = 1e6, 1e4
"""rope_theta of layers with full attention, and of the others, if config.json has no keys for them."""


class Gemma3(Decoder):
    """Gemma 2 with a norm over each head of queries and keys, and a rotary embedding for each kind of layer."""

    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    model_type: ClassVar[str] = "gemma3_text"
    activation: ClassVar[tuple[str, str]] = ("hidden_activation", "gelu_pytorch_tanh")
    keys: ClassVar[ConfigKeys] = (
        KEYS.reading("rope_local_base_freq", "sliding_window_pattern")
        .accepting(attn_logit_softcapping=(None,))
        .with_ropes_by_type()
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Older files have rope_theta and rope_scaling of full layers, and rope_local_base_freq of the others."""
        theta = config.get("rope_theta") or THETA
        shape = gemma_shape(rope_config(config, FULL, theta), cls.activation)
        local = rope_config(config, SLIDING, read_key(config, "rope_local_base_freq", float, LOCAL_THETA))
        ropes = {FULL: shape.ropes[0], SLIDING: RotarySpec.from_config(local, shape.head_dim)}
        pattern = read_key(config, "sliding_window_pattern", int, PATTERN, least=1)
        kinds = alternating_types(config, shape.num_layers, lambda layer: (layer + 1) % pattern == 0)
        return evolve(
            shape,
            qk_norm=True,
            ropes=tuple(ropes[kind] for kind in kinds),
            sliding_windows=windows_of(kinds, read_window(config, DEFAULT_WINDOW), "sliding_window is null"),
            logit_softcap=read_optional(config, "final_logit_softcapping", None),
        )
