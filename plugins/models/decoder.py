"""The pre-norm decoder of Llama and related models. Their own files hold only their differences."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import Angles, LayerFactory, RotarySpec
from engine.core.models import Model, ModelSpec
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys

if TYPE_CHECKING:
    from engine.core.distributed import PartialSum
    from engine.core.models import ForwardPass

LAYER_TYPES = ("full_attention", "sliding_attention")
FORMER_LAYER_TYPES = {"attention": "full_attention"}
"""Names in older files -> the names now."""


@frozen(kw_only=True)
class DecoderConfig:
    """The network that a config.json describes, in one form for all architectures."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    norm_eps: float
    tied: bool
    """Whether the LM head multiplies by the embedding."""
    rope: RotarySpec
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of queries and keys is normalized before the rotary embedding."""


class Decoder(Model):
    """Embedding, decoder blocks of attention and gated MLP, norm, LM head."""

    api: ClassVar[str] = "2"
    architecture: ClassVar[str]
    """Name in config.json's `architectures`."""
    model_type: ClassVar[str]
    keys: ClassVar[ConfigKeys] = ConfigKeys()
    """What the architecture does with each key of config.json."""

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json. Raises CheckpointError if a key is missing, naming it."""

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Refuses other architectures, activations other than silu, and values of keys that are not computed."""
        named, model_type = config.get("architectures"), config.get("model_type")
        if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
            return f"config.json has architectures: {json.dumps(named)}; it must be a list of names"
        is_mine = cls.architecture in named if named else model_type == cls.model_type
        if not is_mine:
            what = ", ".join(named) if named else f"of model_type {model_type!r}"
            return f"it builds {cls.architecture}, and this checkpoint is {what}"
        if model_type not in (None, cls.model_type):
            return (
                f"config.json has the architecture {cls.architecture} and model_type {model_type!r}, which are two"
                f" different networks; correct the one that is wrong ({cls.architecture} is {cls.model_type!r})"
            )
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            return f"it computes the activation silu, and this checkpoint wants {activation!r}"
        return cls.keys.refuses(config)

    @classmethod
    def unknown_keys(cls, config: Mapping[str, Any]) -> Sequence[str]:
        return cls.keys.unknown(config)

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        shape = cls.parse(config)
        return ModelSpec(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_len=shape.max_len,
            sliding_windows=shape.sliding_windows,
            scale=shape.head_dim**-0.5,
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        shape = self.parse(config)
        self._embedding = layers.embedding("model.embed_tokens", shape.vocab_size, shape.hidden_size)
        self._rotary = layers.rotary(shape.rope)
        self._blocks = [DecoderBlock(index, shape, layers) for index in range(shape.num_layers)]
        self._norm = layers.norm("model.norm", shape.hidden_size, shape.norm_eps)
        tied = self._embedding if shape.tied else None
        self._lm_head = layers.lm_head("lm_head", shape.vocab_size, shape.hidden_size, tied)

    def forward(self, run: ForwardPass) -> torch.Tensor:
        angles = self._rotary.angles(run.batch.positions)
        hidden: torch.Tensor | PartialSum = self._embedding(run.batch.tokens)
        residual: torch.Tensor | None = None
        for block in self._blocks:
            hidden, residual = block(run, hidden, residual, angles)
        return self._norm(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._lm_head(hidden)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._lm_head.greedy(hidden)


class DecoderBlock:
    """One decoder layer: attention, then the gated MLP, each with its input norm."""

    def __init__(self, index: int, shape: DecoderConfig, layers: LayerFactory) -> None:
        name = f"model.layers.{index}"
        self.attention = layers.attention_block(
            index,
            f"{name}.self_attn",
            shape.hidden_size,
            norm=f"{name}.input_layernorm",
            eps=shape.norm_eps,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            qk_norm=shape.qk_norm,
        )
        self.mlp = layers.gated_mlp(
            f"{name}.mlp",
            shape.hidden_size,
            shape.intermediate_size,
            norm=f"{name}.post_attention_layernorm",
            eps=shape.norm_eps,
            bias=shape.mlp_bias,
        )

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[PartialSum, torch.Tensor]:
        """hidden: what the previous block adds to `residual`; both [tokens, hidden_size]. Returns the next two."""
        hidden, residual = self.attention(run, hidden, residual, angles)
        return self.mlp(hidden, residual)


def parse_decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the keys that all architectures share. Defaults: no biases, no head norm, full attention."""
    num_layers = read_key(config, "num_hidden_layers", int, least=1)
    num_heads = read_key(config, "num_attention_heads", int, least=1)
    num_kv_heads = read_key(config, "num_key_value_heads", int, num_heads, least=1)
    hidden_size = read_key(config, "hidden_size", int, least=1)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads ({num_kv_heads}) does not divide num_attention_heads ({num_heads})"
        )
    head_dim = read_key(config, "head_dim", int, hidden_size // num_heads, least=1)
    rope = RotarySpec.from_config(config, head_dim)
    return DecoderConfig(
        vocab_size=read_key(config, "vocab_size", int, least=1),
        hidden_size=hidden_size,
        intermediate_size=read_key(config, "intermediate_size", int, least=1),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=rope.longest(read_key(config, "max_position_embeddings", int, least=1)),
        norm_eps=read_key(config, "rms_norm_eps", float),
        tied=read_key(config, "tie_word_embeddings", bool, False),
        rope=rope,
        sliding_windows=(None,) * num_layers,
    )


def windows_by_type(
    config: Mapping[str, Any], num_layers: int, window: int | None, settings: str
) -> tuple[int | None, ...] | None:
    """Sliding window of each layer by layer_types: `window`, or None with full attention. None: without layer_types.

    settings: the keys that set `window`, for errors. Raises CheckpointError for layer_types that cannot be computed.
    """
    stored = config.get("layer_types")
    if stored is None:
        return None
    kinds = [FORMER_LAYER_TYPES.get(str(kind), kind) for kind in stored] if isinstance(stored, list) else []
    if len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types must name {' or '.join(LAYER_TYPES)} for each of {num_layers} layers,"
            f" not {stored!r}"
        )
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(f"config.json: layer_types has sliding_attention, but {settings}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
