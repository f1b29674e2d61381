"""config.json of EAGLE-3 heads, in the form of SafeAILab's checkpoints and in that of the `speculators` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.weights import read_key
from engine.plugins.speculators.heads_config import HeadLayerConfig, parse_head_layer, refuses_depth

TYPE = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODELOPT = "eagle_config"
"""Where modelopt keeps what others keep at the top."""
HEADS = "EAGLE-3 heads"


@frozen(kw_only=True)
class Eagle3Config:
    """The one decoder layer of the heads, and what is around it."""

    layer: HeadLayerConfig
    num_drafts: int
    """Number of draft tokens."""
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
    depth = refuses_depth(layer, HEADS, where=where)
    if depth is not None:
        raise CheckpointError(depth)
    parsed = parse_head_layer(layer, HEADS, where=where)
    return Eagle3Config(
        layer=parsed,
        num_drafts=read_key(config, "draft_vocab_size", int, parsed.vocab_size, least=1),
        **flags,
        hidden_layers=_hidden_layers(config, target_layers),
    )


def _norms(config: Mapping[str, Any]) -> dict[str, bool]:
    """The keys that say where norms are."""
    names, nested = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), config.get(MODELOPT) or {}
    return {name: read_key(config, name, bool, read_key(nested, name, bool, False, where=MODELOPT)) for name in names}


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
