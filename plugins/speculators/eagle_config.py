"""config.json of EAGLE-1 and EAGLE-2 heads, in the form of SafeAILab's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.core.weights import read_key
from engine.plugins.speculators.eagle3_config import TYPE, is_eagle3
from engine.plugins.speculators.heads_config import HeadLayerConfig, parse_head_layer, refuses_depth

HEADS = "EAGLE heads"


@frozen(kw_only=True)
class EagleConfig:
    """The one decoder layer of the heads, and its biases."""

    layer: HeadLayerConfig
    fc_bias: bool
    """Whether config.json says that `fc` has a bias. Some files have the bias and do not say so."""
    qkv_bias: bool
    """Whether config.json says that queries, keys and values have biases."""


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names EAGLE-1 or EAGLE-2 heads. Many such heads name the target's architecture instead."""
    named = config.get("architectures") or ()
    return not is_eagle3(config) and any("eagle" in str(name).lower() for name in named)


def refuses_eagle(config: Mapping[str, Any]) -> str | None:
    """Return a refusal: why a config.json is not of EAGLE-1 or EAGLE-2 heads, and what would work. None: it may be."""
    if is_eagle3(config):
        return "speculator.model has EAGLE-3 heads; use the speculator eagle3"
    if TYPE in config:
        return (
            f"config.json of speculator.model has {TYPE}: {config[TYPE]!r}, and only EAGLE-3 heads are read in the form"
            " of the speculators library; use heads in the form of EAGLE's authors"
        )
    depth = refuses_depth(config, HEADS, where="config.json of speculator.model")
    return (
        None if depth is None else f"{depth}; use heads of one layer, or a whole model with the speculator draft_model"
    )


def parse_eagle(config: Mapping[str, Any]) -> EagleConfig:
    """Read a config.json. Raises CheckpointError if a key is missing, or asks for what is not computed."""
    layer = parse_head_layer(config, HEADS)
    return EagleConfig(
        layer=layer,
        fc_bias=read_key(config, "bias", bool, False),
        qkv_bias=read_key(config, "qkv_bias", bool, layer.attention_bias),
    )
