"""One form of a decoder's network for all architectures, and the functions that read a config.json into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import NormKind, RotarySpec
from engine.core.quant import Activation
from engine.core.weights import read_key
from engine.plugins.models.sparse import SparseConfig

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
FORMER_LAYER_TYPES = {"attention": FULL}
"""Names in older files -> present names."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names in config.json -> the activation."""
HIDDEN_ACT = ("hidden_act", "silu")
"""The usual key of the activation, and its default."""


@frozen(kw_only=True)
class BlockNorms:
    """Names of the norms in a decoder layer, within the layer's module; empty: there is none."""

    attention: str = "input_layernorm"
    """Of the attention block's input."""
    mlp: str = "post_attention_layernorm"
    """Of the MLP's input."""
    attention_output: str = ""
    """Of the attention block's result, before the residual addition."""
    mlp_output: str = ""
    """Of the MLP's result, before the residual addition."""


@frozen(kw_only=True)
class DecoderConfig:
    """The network that a config.json describes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    extended_max_len: int = 0
    """Longest context that --max-len may ask for, where that exceeds `max_len`."""
    norm_eps: float
    tied: bool
    """Whether the LM head multiplies by the embedding."""
    ropes: tuple[RotarySpec | None, ...]
    """Per layer. None: queries and keys are not rotated."""
    sliding_windows: tuple[int | None, ...]
    """Per layer. None: full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | Literal["projection"] = False
    """Whether queries and keys are normalized before the rotary embedding: each head, or all heads together."""
    activation: Activation = "silu"
    norms: BlockNorms = BlockNorms()
    norm_kind: NormKind = "rms"
    scale: float | None = None
    """Factor on q.k before the softmax. None: head_dim ** -0.5."""
    softcap: float | None = None
    """Attention scores become softcap * tanh(score / softcap). None: unchanged."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on the result of each block before it is added to the residual."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    fused_qkv: str = ""
    """Name of the tensor with the projections to queries, keys and values. Empty: there are three tensors."""
    fused_gate_up: str = ""
    """Name of the tensor with the gate and up projections. Empty: there are two tensors."""
    sinks: bool = False
    """Whether the attention of every layer has sinks."""
    sparse: SparseConfig | None = None
    """The mixture of experts in place of some layers' MLP."""
    prefix: str = "model."
    """Of the names of the decoder's tensors."""
    head: str = "lm_head"
    """Name of the output layer."""


def parse_decoder(
    config: Mapping[str, Any],
    *,
    eps: str = "rms_norm_eps",
    activation: tuple[str, str] = HIDDEN_ACT,
    tied: bool = False,
    interleaved: bool = False,
) -> DecoderConfig:
    """Read the keys that all architectures share. Defaults: no biases, no head norm, full attention.

    eps: the key of the norms' epsilon. activation: the key of the activation, and its default. tied: whether a file
    without tie_word_embeddings means a tied LM head. interleaved: as in RotarySpec.
    """
    refusal = refuses_activation(config, activation)
    if refusal is not None:
        raise CheckpointError(refusal)
    num_layers = read_key(config, "num_hidden_layers", int, least=1)
    num_heads = read_key(config, "num_attention_heads", int, least=1)
    num_kv_heads = read_key(config, "num_key_value_heads", int, num_heads, least=1)
    hidden_size = read_key(config, "hidden_size", int, least=1)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads ({num_kv_heads}) does not divide num_attention_heads ({num_heads})"
        )
    head_dim = read_key(config, "head_dim", int, hidden_size // num_heads, least=1)
    rope = RotarySpec.from_config(config, head_dim, interleaved=interleaved)
    longest = read_key(config, "max_position_embeddings", int, least=1)
    return DecoderConfig(
        vocab_size=read_key(config, "vocab_size", int, least=1),
        hidden_size=hidden_size,
        intermediate_size=read_key(config, "intermediate_size", int, least=1),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=rope.longest(longest),
        extended_max_len=rope.extended(longest),
        norm_eps=read_key(config, eps, float),
        tied=read_key(config, "tie_word_embeddings", bool, tied),
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        activation=ACTIVATIONS[config.get(*activation)],
    )


def refuses_activation(config: Mapping[str, Any], activation: tuple[str, str]) -> str | None:
    """Return a refusal: why the activation of this config.json cannot be computed. None: it can.

    activation: as in parse_decoder.
    """
    name = config.get(*activation)
    if isinstance(name, str) and name in ACTIVATIONS:
        return None
    return f"config.json has {activation[0]}: {name!r}, which is not supported; known are {', '.join(ACTIVATIONS)}"


def windows_by_type(
    config: Mapping[str, Any], num_layers: int, window: int | None, settings: str
) -> tuple[int | None, ...] | None:
    """Sliding window of each layer by layer_types: `window`, or None with full attention. None: without layer_types.

    settings: the keys that set `window`, for errors. Raises CheckpointError for layer_types that cannot be computed.
    """
    kinds = layer_types(config, num_layers)
    return None if kinds is None else windows_of(kinds, window, settings)


def windows_of(kinds: Sequence[str], window: int | None, settings: str) -> tuple[int | None, ...]:
    """Sliding window of each layer by its kind; as windows_by_type."""
    if window is None and SLIDING in kinds:
        raise CheckpointError(f"config.json: layer_types has {SLIDING}, but {settings}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    """The sliding window, tokens; None if config.json has null. default: for files without the key."""
    if config.get("sliding_window", default) is None:
        return None
    return read_key(config, "sliding_window", int, default, least=1)


def read_optional(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """The positive number of a key; None if config.json has null. default: for files without the key."""
    if config.get(key, default) is None:
        return None
    return read_key(config, key, float, default, least=1e-6)


def rope_config(config: Mapping[str, Any], kind: str, theta: float) -> Mapping[str, Any]:
    """config.json with the rope parameters of one kind of layer alone; the file may have them by kind.

    Older files have those of full attention at the top level, as files with one kind of layer have them. theta:
    rope_theta if the file has none for the kind.
    """
    scaling = config.get("rope_scaling") if kind == FULL else None
    table = {**((config.get("rope_parameters") or {}).get(kind) or {}), **(scaling or {})}
    table.setdefault("rope_theta", theta)
    return {**config, "rope_scaling": None, "rope_theta": None, "rope_parameters": table}


def with_theta(config: Mapping[str, Any], theta: float) -> Mapping[str, Any]:
    """config.json with rope_theta, if it has none."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return config if "rope_theta" in config or "rope_theta" in table else {**config, "rope_theta": theta}


def with_rope(config: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with these rope parameters, if it has no table of them."""
    lacks = config.get("rope_parameters") is None and not config.get("rope_scaling")
    return {**config, "rope_parameters": table} if lacks else config


def layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...] | None:
    """The kind of each layer, one of LAYER_TYPES. None: the file has no layer_types.

    Raises CheckpointError for layer_types that cannot be computed.
    """
    stored = config.get("layer_types")
    if stored is None:
        return None
    kinds = [FORMER_LAYER_TYPES.get(str(kind), str(kind)) for kind in stored] if isinstance(stored, list) else []
    if len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types must name {' or '.join(LAYER_TYPES)} for each of {num_layers} layers,"
            f" not {stored!r}"
        )
    return tuple(kinds)


def alternating_types(config: Mapping[str, Any], num_layers: int, is_full: Callable[[int], bool]) -> tuple[str, ...]:
    """The kind of each layer by layer_types; in files without that key, by the layer's number."""
    kinds = layer_types(config, num_layers)
    return kinds or tuple(FULL if is_full(layer) else SLIDING for layer in range(num_layers))
