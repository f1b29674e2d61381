"""Ministral 3 and Devstral 2."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder_config import DecoderConfig, with_rope
from engine.plugins.models.mistral import Mistral

GROWTH = "llama_4_scaling_beta"
"""Key of rope parameters with RotarySpec.query_growth."""
ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    GROWTH: 0.1,
}
"""Rope parameters if config.json has no table of them."""


class Ministral3(Mistral):
    """Mistral with queries that grow with their position, and a sliding window only if config.json has one."""

    architecture: ClassVar[str] = "Ministral3ForCausalLM"
    model_type: ClassVar[str] = "ministral3"
    keys: ClassVar[ConfigKeys] = Mistral.keys.reading_rope(GROWTH, "max_position_embeddings")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """The table's max_position_embeddings, which is that of the file, is not read."""
        shape = super().parse({"sliding_window": None, **with_rope(config, ROPE)})
        grown = [
            rope and evolve(rope, query_growth=read_key(rope.parameters, GROWTH, float, 0.0)) for rope in shape.ropes
        ]
        return evolve(shape, ropes=tuple(grown))
