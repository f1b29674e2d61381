"""Command R7B and its successors of the same type (Cohere 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from attrs import evolve

from engine.core.distributed import PartialSum
from engine.core.layers import Angles, LayerFactory
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Block, Decoder, DecoderBlock
from engine.plugins.models.decoder_config import (
    SLIDING,
    BlockNorms,
    DecoderConfig,
    alternating_types,
    parse_decoder,
    read_window,
    windows_of,
)

if TYPE_CHECKING:
    from engine.core.models import ForwardPass

DEFAULT_WINDOW = 4096
"""Sliding window if config.json has no key for it."""
PATTERN = 4
"""The last of every PATTERN layers has full attention, if config.json has no key for it."""


class Cohere2(Decoder):
    """The decoder with one layer norm per layer, attention and MLP side by side, and no rotation in layers with full
    attention."""

    architecture: ClassVar[str] = "Cohere2ForCausalLM"
    model_type: ClassVar[str] = "cohere2"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("attention_bias", "layer_norm_eps", "logit_scale", "sliding_window_pattern")
        .ignoring("rms_norm_eps")
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Layers with sliding windows rotate queries and keys."""
        shape = parse_decoder(config, eps="layer_norm_eps", tied=True, interleaved=True)
        pattern = read_key(config, "sliding_window_pattern", int, PATTERN, least=1)
        kinds = alternating_types(config, shape.num_layers, lambda layer: (layer + 1) % pattern == 0)
        bias = read_key(config, "attention_bias", bool, False)
        return evolve(
            shape,
            qkv_bias=bias,
            output_bias=bias,
            norm_kind="layer",
            norms=BlockNorms(attention="", mlp=""),
            ropes=tuple(rope if kind == SLIDING else None for rope, kind in zip(shape.ropes, kinds, strict=True)),
            sliding_windows=windows_of(kinds, read_window(config, DEFAULT_WINDOW), "sliding_window is null"),
            logit_scale=read_key(config, "logit_scale", float, 0.0625),
        )

    @classmethod
    def block(cls, index: int, shape: DecoderConfig, layers: LayerFactory) -> Block:
        return ParallelBlock(index, shape, layers)


class ParallelBlock:
    """One decoder layer: the sum of attention and MLP of one norm."""

    def __init__(self, index: int, shape: DecoderConfig, layers: LayerFactory) -> None:
        name = f"{shape.prefix}layers.{index}.input_layernorm"
        self.norm = layers.norm(name, shape.hidden_size, shape.norm_eps, shape.norm_kind)
        self.blocks = DecoderBlock(index, shape, layers, Cohere2.mlp)

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """As DecoderBlock."""
        normed, residual = self.norm(hidden, residual)
        attended, _ = self.blocks.attention(run, normed, None, angles)
        activated, _ = self.blocks.mlp(normed, None)
        return cast("PartialSum", attended) + cast("PartialSum", activated), residual  # without norms of results
