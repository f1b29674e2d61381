"""The decoder of Llama and related models, whose own files hold only the differences."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine.core.layers import Angles, LayerFactory
from engine.core.models import Model, ModelSpec
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder_config import HIDDEN_ACT, DecoderConfig, refuses_activation

if TYPE_CHECKING:
    from engine.core.distributed import PartialSum
    from engine.core.models import ForwardPass

MLPBlock = Callable[
    ["torch.Tensor | PartialSum", "torch.Tensor | None"], "tuple[torch.Tensor | PartialSum, torch.Tensor]"
]
"""The MLP of a decoder layer with its norms: hidden and residual to the next two, as a GatedMLP."""
Block = Callable[
    ["ForwardPass", "torch.Tensor | PartialSum", "torch.Tensor | None", "Angles | None"],
    "tuple[torch.Tensor | PartialSum, torch.Tensor]",
]
"""A decoder layer, as DecoderBlock."""


class Decoder(Model):
    """Embedding, decoder blocks of attention and MLP, norm, LM head."""

    api: ClassVar[str] = "2"
    architecture: ClassVar[str]
    """Name in config.json's `architectures`."""
    model_type: ClassVar[str]
    activation: ClassVar[tuple[str, str]] = HIDDEN_ACT
    """The key of config.json with the activation of the MLP, and its default."""
    keys: ClassVar[ConfigKeys] = ConfigKeys()
    """What the architecture does with each key of config.json."""

    @classmethod
    def normalized(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json in the form that `keys` and `parse` know. Override it where files have another form."""
        return config

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json. Raises CheckpointError if a key is missing, naming it."""

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Refuses other architectures, unknown activations, and values of keys that are not computed."""
        named, model_type = config.get("architectures"), config.get("model_type")
        if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
            return f"config.json has architectures: {json.dumps(named)}; it must be a list of names"
        is_mine = cls.architecture in named if named else model_type == cls.model_type
        if not is_mine:
            what = ", ".join(named) if named else f"of model_type {model_type!r}"
            return f"this checkpoint is {what}, another architecture"
        if model_type not in (None, cls.model_type):
            return (
                f"config.json has the architecture {cls.architecture} and model_type {model_type!r}, which are two"
                f" different networks; correct the one that is wrong ({cls.architecture} is {cls.model_type!r})"
            )
        config = cls.normalized(config)
        return refuses_activation(config, cls.activation) or cls.keys.refuses(config)

    @classmethod
    def unknown_keys(cls, config: Mapping[str, Any]) -> Sequence[str]:
        return cls.keys.unknown(cls.normalized(config))

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        shape = cls.parse(cls.normalized(config))
        return ModelSpec(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_len=shape.max_len,
            extended_max_len=shape.extended_max_len,
            sliding_windows=shape.sliding_windows,
            scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            softcap=shape.softcap,
            sinks=(True,) * shape.num_layers if shape.sinks else (),
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        shape = self.parse(self.normalized(config))
        self.prepare(layers)
        self._embedding = layers.embedding(
            f"{shape.prefix}embed_tokens", shape.vocab_size, shape.hidden_size, scale=shape.embedding_scale
        )
        ropes = [rope for index, rope in enumerate(shape.ropes) if rope not in shape.ropes[:index]]
        self._rotaries = [None if rope is None else layers.rotary(rope) for rope in ropes]
        self._blocks = [(self.block(index, shape, layers), ropes.index(rope)) for index, rope in enumerate(shape.ropes)]
        """Each decoder layer, and the number of its rotary embedding."""
        self._norm = layers.final_norm(
            f"{shape.prefix}norm", shape.hidden_size, shape.norm_eps, shape.norm_kind, num_layers=shape.num_layers
        )
        tied = self._embedding if shape.tied else None
        self._lm_head = layers.lm_head(
            shape.head,
            shape.vocab_size,
            shape.hidden_size,
            tied,
            scale=shape.logit_scale,
            softcap=shape.logit_softcap,
        )

    @classmethod
    def prepare(cls, layers: LayerFactory) -> None:
        """Tell the factory of other names and of tensors to ignore, before layers are made. Does nothing by default."""

    @classmethod
    def block(cls, index: int, shape: DecoderConfig, layers: LayerFactory) -> Block:
        """Decoder layer `index`. Override it for layers that connect attention and MLP in another way."""
        return DecoderBlock(index, shape, layers, cls.mlp)

    @classmethod
    def mlp(cls, index: int, shape: DecoderConfig, layers: LayerFactory) -> MLPBlock:
        """The MLP of decoder layer `index`, or its mixture of experts."""
        name = f"{shape.prefix}layers.{index}"
        if shape.sparse is not None and index in shape.sparse.layers:
            return shape.sparse.make(name, layers, shape.hidden_size, shape.norm_eps)
        return layers.gated_mlp(
            f"{name}.mlp",
            shape.hidden_size,
            shape.intermediate_size,
            norm=named(name, shape.norms.mlp),
            eps=shape.norm_eps,
            bias=shape.mlp_bias,
            activation=shape.activation,
            norm_kind=shape.norm_kind,
            output_norm=named(name, shape.norms.mlp_output),
            output_scale=shape.residual_scale,
            gate_up=shape.fused_gate_up,
        )

    def forward(self, run: ForwardPass) -> torch.Tensor:
        positions = run.batch.positions
        angles = [None if rotary is None else rotary.angles(positions) for rotary in self._rotaries]
        hidden: torch.Tensor | PartialSum = self._embedding(run.batch.tokens)
        residual: torch.Tensor | None = None
        for block, rope in self._blocks:
            hidden, residual = block(run, hidden, residual, angles[rope])
        return self._norm(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._lm_head(hidden)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._lm_head.greedy(hidden)


class DecoderBlock:
    """One decoder layer: attention, then the MLP, each with its norms."""

    def __init__(
        self,
        index: int,
        shape: DecoderConfig,
        layers: LayerFactory,
        mlp: Callable[[int, DecoderConfig, LayerFactory], MLPBlock],
    ) -> None:
        """mlp: makes the MLP."""
        name, rope = f"{shape.prefix}layers.{index}", shape.ropes[index]
        self.attention = layers.attention_block(
            index,
            f"{name}.self_attn",
            shape.hidden_size,
            norm=named(name, shape.norms.attention),
            eps=shape.norm_eps,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            qk_norm=shape.qk_norm,
            sinks=shape.sinks,
            norm_kind=shape.norm_kind,
            output_norm=named(name, shape.norms.attention_output),
            output_scale=shape.residual_scale,
            qkv=shape.fused_qkv,
            interleaved=rope is not None and rope.interleaved,
        )
        self.mlp = mlp(index, shape, layers)

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """hidden: what the previous block adds to `residual`; both [tokens, hidden_size]. Returns the next two."""
        hidden, residual = self.attention(run, hidden, residual, angles)
        return self.mlp(hidden, residual)


def named(module: str, norm: str) -> str:
    """The qualified name of a norm in a module; empty for none."""
    return f"{module}.{norm}" if norm else ""
