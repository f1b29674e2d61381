"""The one decoder layer of drafting heads, as config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import RotarySpec
from engine.core.models import ModelSpec
from engine.core.weights import read_key


@frozen(kw_only=True)
class HeadLayerConfig:
    """One decoder layer of attention and a gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RotarySpec
    max_len: int
    vocab_size: int
    """Number of tokens with an embedding."""
    attention_bias: bool
    """Whether the projections of attention have biases."""
    window: int | None
    """Sliding window of attention; None: full attention."""

    def model_spec(self, vocab_size: int) -> ModelSpec:
        """The shape of the layer. vocab_size: number of draft tokens."""
        return ModelSpec(
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=vocab_size,
            max_len=self.max_len,
            sliding_windows=(self.window,),
            scale=self.head_dim**-0.5,
        )


def parse_head_layer(config: Mapping[str, Any], heads: str, *, where: str = "config.json") -> HeadLayerConfig:
    """Read the layer. heads: how errors name the heads; where: how they name the table.

    Raises CheckpointError if a key is missing, or asks for what is not computed.
    """
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where} has hidden_act: {config['hidden_act']!r}; {heads} are computed with silu")
    hidden_size = read_key(config, "hidden_size", int, least=1, where=where)
    num_heads = read_key(config, "num_attention_heads", int, least=1, where=where)
    head_dim = read_key(config, "head_dim", int, hidden_size // num_heads, least=1, where=where)
    return HeadLayerConfig(
        hidden_size=hidden_size,
        intermediate_size=read_key(config, "intermediate_size", int, least=1, where=where),
        num_heads=num_heads,
        num_kv_heads=read_key(config, "num_key_value_heads", int, num_heads, least=1, where=where),
        head_dim=head_dim,
        norm_eps=read_key(config, "rms_norm_eps", float, where=where),
        rope=RotarySpec.from_config(config, head_dim),
        max_len=read_key(config, "max_position_embeddings", int, least=1, where=where),
        vocab_size=read_key(config, "vocab_size", int, least=1, where=where),
        attention_bias=read_key(config, "attention_bias", bool, False, where=where),
        window=_window(config, where),
    )


def refuses_depth(config: Mapping[str, Any], heads: str, *, where: str = "config.json") -> str | None:
    """A clause that says why heads of several layers are not computed; None: there is one layer."""
    layers = config.get("num_hidden_layers")
    return None if layers in (None, 1) else f"{where} has num_hidden_layers: {layers!r}; {heads} have one"


def _window(config: Mapping[str, Any], where: str) -> int | None:
    """The sliding window of the layer, None without one."""
    if "sliding_attention" not in (config.get("layer_types") or ()):
        return None
    return read_key(config, "sliding_window", int, least=1, where=where)
