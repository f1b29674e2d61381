"""Multi-token prediction (MTP) heads among a model's own weights: those of MiMo (arXiv:2505.07608)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine.core.speculators import DrafterShape, DrafterSpec, SpeculatorSpec
from engine.plugins.speculators.heads import DraftHeads, HeadLayer, from_target
from engine.plugins.speculators.heads_config import parse_head_layer

if TYPE_CHECKING:
    from engine.core.layers import LayerFactory
    from engine.core.models import ForwardPass

HEADS = "MTP heads"
ARCHITECTURE = "MiMoForCausalLM"
DEPTH = "num_nextn_predict_layers"
NAME = "model.mtp_layers.0"
OTHERS = ("model.embed_tokens.*", "model.layers.*", "model.norm.*", "lm_head.*")
"""Tensors of the checkpoint that are the model's."""


class MTP(DraftHeads):
    """Predicts the token after the next from the output of the model's last layer, before the norm.

    A linear layer joins the hidden state and the embedding of the next token, each normed; a decoder layer and a norm
    of its own follow. Embedding and LM head are the model's. The heads are trained for one token: further drafts
    compute the same layer again, over its own output before the norm.
    """

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        if spec.config is not None:
            return (
                "its heads are among the model's own weights, but speculator.model (--speculator-model) is set; leave"
                " it out, or choose another speculator"
            )
        if spec.target_config is None:
            return "it needs the config.json of the model"
        return refuses_mtp(spec.target_config)

    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        layer = parse_head_layer(spec.config, HEADS)
        return DrafterShape(model_spec=layer.model_spec(layer.vocab_size), hidden_layers=(spec.target.num_layers,))

    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: None) -> None:
        config = parse_head_layer(spec.config, HEADS)
        size, eps = config.hidden_size, config.norm_eps
        self._target_greedy = from_target(spec.target_greedy, HEADS, "LM head")
        self._embedding = from_target(spec.target_embedding, HEADS, "embedding")
        self._hidden_norm = layers.norm(f"{NAME}.hidden_layernorm", size, eps)
        self._embedding_norm = layers.norm(f"{NAME}.token_layernorm", size, eps)
        self._projection = layers.linear([(f"{NAME}.input_proj", size)], 2 * size)
        self._layer = HeadLayer(NAME, config, layers, norm=f"{NAME}.input_layernorm", qkv_bias=True)
        self._norm = layers.norm(f"{NAME}.final_layernorm", size, eps)
        for pattern in OTHERS:
            layers.ignore(pattern)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, run: ForwardPass, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        hidden, embedded = self._hidden_norm(features)[0], self._embedding_norm(self._embedding(tokens))[0]
        return self._layer(run, self._projection(torch.cat((hidden, embedded), -1)))

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target_greedy(self._norm(hidden)[0])


def refuses_mtp(config: Mapping[str, Any]) -> str | None:
    """Return a refusal: why the MTP heads of a model cannot be computed, and what would work. None: they can."""
    depth, named = config.get(DEPTH), config.get("architectures") or ()
    if not depth:
        return f"config.json of the model has no {DEPTH}, so the model has no MTP heads; use another speculator"
    if ARCHITECTURE not in named:
        what = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
        return f"it reads the MTP heads of {ARCHITECTURE}, and this model is {what}; use another speculator"
    if depth != 1:
        return f"config.json of the model has {DEPTH}: {depth!r}, and MTP heads have one layer; use another speculator"
    if config.get("use_sliding_window"):
        return (
            "config.json of the model has use_sliding_window: true, and MTP heads are computed with full attention; use"
            " another speculator"
        )
    return None
