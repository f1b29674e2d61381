"""Llama (arXiv:2302.13971, arXiv:2407.21783)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.errors import CheckpointError
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, windows_by_type


class Llama(Decoder):
    """The plain decoder, with biases where config.json asks for them."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
    keys: ClassVar[ConfigKeys] = ConfigKeys().reading("attention_bias", "mlp_bias")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """attention_bias applies to all four projections of attention, mlp_bias to all three of the MLP.

        Raises CheckpointError for a sliding window, which this architecture does not have.
        """
        shape = parse_decoder(config)
        window = config.get("sliding_window")
        if window is not None and read_key(config, "sliding_window", int) < shape.max_len:
            raise CheckpointError(
                f"config.json has sliding_window: {window}, but {cls.architecture} has full attention in all layers;"
                " give null, or the architecture that the model was trained as"
            )
        windows_by_type(config, shape.num_layers, None, f"{cls.architecture} has full attention in all layers")
        attention_bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            shape,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=read_key(config, "mlp_bias", bool, False),
        )
