"""Mixtral (arXiv:2401.04088)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, with_theta
from engine.plugins.models.sparse import TRAINING_KEYS, SparseConfig, routing_spec

THETA = 1e6
"""rope_theta if config.json has no key for it."""


class Mixtral(Decoder):
    """The decoder with experts in all layers, whose factors are renormalized, and perhaps a sliding window."""

    architecture: ClassVar[str] = "MixtralForCausalLM"
    model_type: ClassVar[str] = "mixtral"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("num_experts_per_tok", "num_local_experts")
        .accepting(router_jitter_noise=(None, 0, 0.0))
        .ignoring(*TRAINING_KEYS)
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        shape = parse_decoder(with_theta(config, THETA))
        window = None
        if config.get("sliding_window") is not None:
            window = read_key(config, "sliding_window", int, least=1)
        sparse = SparseConfig(
            layers=frozenset(range(shape.num_layers)),
            routing=routing_spec(config, renormalize=True),
            intermediate_size=shape.intermediate_size,
            activation=shape.activation,
            modules=("block_sparse_moe", "mlp"),
            projections=("w1", "w3", "w2"),
        )
        return evolve(shape, sparse=sparse, sliding_windows=(window,) * shape.num_layers)
