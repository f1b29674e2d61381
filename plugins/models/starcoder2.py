"""StarCoder2 (arXiv:2402.19173)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from engine.core.layers import LayerFactory
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Decoder, MLPBlock, named
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder, read_window


class Starcoder2(Decoder):
    """The decoder with layer norms, an MLP without gate, biases everywhere, and a sliding window in all layers."""

    architecture: ClassVar[str] = "Starcoder2ForCausalLM"
    model_type: ClassVar[str] = "starcoder2"
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "gelu_pytorch_tanh")
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("norm_epsilon", "use_bias")
        .ignoring("embedding_dropout", "residual_dropout", "rms_norm_eps")
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """use_bias applies to all linear layers."""
        shape = parse_decoder(config, eps="norm_epsilon", activation=cls.activation, tied=True)
        bias = read_key(config, "use_bias", bool, True)
        return evolve(
            shape,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            norm_kind="layer_bias",
            sliding_windows=(read_window(config, None),) * shape.num_layers,
        )

    @classmethod
    def mlp(cls, index: int, shape: DecoderConfig, layers: LayerFactory) -> MLPBlock:
        name = f"{shape.prefix}layers.{index}"
        return layers.mlp(
            f"{name}.mlp.c_fc",
            f"{name}.mlp.c_proj",
            shape.hidden_size,
            shape.intermediate_size,
            norm=named(name, shape.norms.mlp),
            eps=shape.norm_eps,
            bias=shape.mlp_bias,
            activation=shape.activation,
            norm_kind=shape.norm_kind,
        )
