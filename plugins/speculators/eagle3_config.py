"""config.json of EAGLE-3 heads, in the form of SafeAILab's checkpoints and in that of the `speculators` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import RotarySpec
from engine.core.models import ModelSpec
from engine.core.weights import read_key

TYPE = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODELOPT = "eagle_config"
"""Where modelopt keeps what others keep at the top."""


@frozen(kw_only=True)
class Eagle3Config:
    """The one decoder layer of the heads, and what is around it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RotarySpec
    max_len: int
    bias: bool
    """Whether the projections of attention have biases."""
    vocab_size: int
    """Number of draft tokens."""
    window: int | None
    """Sliding window of attention; None: full attention."""
    norm_before_residual: bool
    """Whether the residual is the normed hidden state."""
    norm_before_fc: bool
    """Whether the hidden states of the target, side by side, are normed together."""
    fc_norm: bool
    """Whether the hidden states of each layer of the target are normed."""
    norm_output: bool
    """Whether the output stands for the target's hidden states after the last norm, not before it."""
    hidden_layers: tuple[int, ...]
    """Layers of the target: the hidden states that enter them are the input."""

    def model_spec(self) -> ModelSpec:
        """The shape of the layer."""
        return ModelSpec(
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            sliding_windows=(self.window,),
            scale=self.head_dim**-0.5,
        )


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of EAGLE-3 heads."""
    named = config.get("architectures") or ()
    return config.get(TYPE) == "eagle3" or any("eagle3" in str(name).lower() for name in named)


def parse_eagle3(config: Mapping[str, Any], target_layers: int) -> Eagle3Config:
    """Read a config.json. target_layers: number of the target's layers.

    Raises CheckpointError if a key is missing, or asks for what is not computed.
    """
    layer = config.get("transformer_layer_config")
    where = "transformer_layer_config in config.json"
    if layer is None:
        layer, where = config, "config.json"
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"config.json: transformer_layer_config is {layer!r}, not a table")
    flags = _norms(config)
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError("config.json has norm_before_fc and fc_norm; EAGLE-3 heads have one of them at most")
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where} has hidden_act: {layer['hidden_act']!r}; EAGLE-3 heads are computed with silu")
    if read_key(layer, "num_hidden_layers", int, 1, where=where) != 1:
        raise CheckpointError(f"{where} has num_hidden_layers: {layer['num_hidden_layers']}; EAGLE-3 heads have one")
    hidden_size = read_key(layer, "hidden_size", int, least=1, where=where)
    num_heads = read_key(layer, "num_attention_heads", int, least=1, where=where)
    head_dim = read_key(layer, "head_dim", int, hidden_size // num_heads, least=1, where=where)
    return Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=read_key(layer, "intermediate_size", int, least=1, where=where),
        num_heads=num_heads,
        num_kv_heads=read_key(layer, "num_key_value_heads", int, num_heads, least=1, where=where),
        head_dim=head_dim,
        norm_eps=read_key(layer, "rms_norm_eps", float, where=where),
        rope=RotarySpec.from_config(layer, head_dim),
        max_len=read_key(layer, "max_position_embeddings", int, least=1, where=where),
        bias=read_key(layer, "attention_bias", bool, False, where=where),
        vocab_size=read_key(
            config, "draft_vocab_size", int, read_key(layer, "vocab_size", int, least=1, where=where), least=1
        ),
        window=_window(layer, where),
        **flags,
        hidden_layers=_hidden_layers(config, target_layers),
    )


def _norms(config: Mapping[str, Any]) -> dict[str, bool]:
    """The keys that say where norms are."""
    names, nested = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), config.get(MODELOPT) or {}
    return {name: read_key(config, name, bool, read_key(nested, name, bool, False, where=MODELOPT)) for name in names}


def _window(layer: Mapping[str, Any], where: str) -> int | None:
    """The sliding window of the layer, None without one."""
    if "sliding_attention" not in (layer.get("layer_types") or ()):
        return None
    return read_key(layer, "sliding_window", int, least=1, where=where)


def _hidden_layers(config: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the heads take: named by the file, else those of the paper's code."""
    given, outputs = config.get(LAYER_IDS), (config.get(MODELOPT) or {}).get(LAYER_IDS)
    if given is None and outputs is None:
        if target_layers < 6:
            raise CheckpointError(
                f"config.json has no {LAYER_IDS}, and the model has {target_layers} layers, too few for the usual ones"
            )
        return 2, target_layers // 2, target_layers - 3
    ids = outputs if given is None else given
    if not (isinstance(ids, list) and ids and all(type(one) is int for one in ids)):
        raise CheckpointError(f"config.json: {LAYER_IDS} is {ids!r}; it must be a list of numbers of layers")
    # modelopt names the layers whose outputs they are, the others those whose inputs.
    return tuple(one + (given is None) for one in ids)
