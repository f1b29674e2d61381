"""Phi-3 and Phi-4 with their small models (arXiv:2404.14219, arXiv:2503.01743)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, read_window

LONGROPE = ("su", "yarn")
"""Names of the rope type longrope in older files."""
ORIGINAL = 4096
"""original_max_position_embeddings if config.json has no key for it."""


class Phi3(Decoder):
    """The decoder with fused projections, longrope and, in some models, a rotary embedding over a part of each head."""

    architecture: ClassVar[str] = "Phi3ForCausalLM"
    model_type: ClassVar[str] = "phi3"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("partial_rotary_factor")
        .accepting(attention_bias=(None, False))
        .ignoring("embd_pdrop", "resid_pdrop")
    )

    @classmethod
    def normalized(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the rope type longrope under its present name."""
        config = {"original_max_position_embeddings": ORIGINAL, **config}
        for key in ("rope_scaling", "rope_parameters"):
            table = config.get(key)
            if isinstance(table, Mapping) and table.get("rope_type", table.get("type")) in LONGROPE:
                config = {**config, key: {**table, "rope_type": "longrope"}}
        return config

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """sliding_window: of all layers; null: full attention."""
        shape = parse_decoder(config)
        return evolve(
            shape,
            sliding_windows=(read_window(config, None),) * shape.num_layers,
            fused_qkv="qkv_proj",
            fused_gate_up="gate_up_proj",
        )
