"""Llama (arXiv:2302.13971, arXiv:2407.21783)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.weights import read_key
from engine.plugins.models.decoder import Decoder, DecoderConfig, parse_decoder


class Llama(Decoder):
    """The plain decoder, with biases where config.json asks for them."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """attention_bias applies to all four projections of attention, mlp_bias to all three of the MLP."""
        attention_bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            parse_decoder(config),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=read_key(config, "mlp_bias", bool, False),
        )
