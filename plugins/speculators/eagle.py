"""EAGLE-1 and EAGLE-2 heads (arXiv:2401.15077, arXiv:2406.16858): one decoder layer that predicts hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.errors import CheckpointError
from engine.core.speculators import DrafterShape, DrafterSpec, SpeculatorSpec
from engine.plugins.speculators.eagle_config import HEADS, parse_eagle, refuses_eagle
from engine.plugins.speculators.heads import DraftHeads, HeadLayer, from_target, has_bias

if TYPE_CHECKING:
    from engine.core.layers import LayerFactory
    from engine.core.models import ForwardPass


class Eagle(DraftHeads):
    """Predicts the model's last hidden state at each token from the one before, normed as for the LM head.

    A linear layer joins the embedding of the next token and the hidden state; a decoder layer without an input norm
    follows. Embedding, norm and LM head are the model's. The two versions differ in the trees of drafts that they
    build, not in the heads; here drafts are chains.
    """

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        if spec.config is None:
            return f"it needs {HEADS}; name their directory or their name on the hub as speculator.model"
        return refuses_eagle(spec.config)

    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        layer = parse_eagle(spec.config).layer
        for what, own, wanted in (
            ("a hidden size", layer.hidden_size, spec.target.hidden_size),
            ("a vocabulary", layer.vocab_size, spec.vocab_size),
        ):
            if own != wanted:
                raise CheckpointError(
                    f"the {HEADS} in {spec.path} are for {what} of {own}, and the model has one of {wanted}; use heads"
                    " that were trained for this model"
                )
        return DrafterShape(model_spec=layer.model_spec(layer.vocab_size), hidden_layers=(spec.target.num_layers,))

    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: None) -> None:
        config = parse_eagle(spec.config)
        size = config.layer.hidden_size
        self._target_norm = from_target(spec.target_norm, HEADS, "norm before the LM head")
        self._target_greedy = from_target(spec.target_greedy, HEADS, "LM head")
        self._embedding = from_target(spec.target_embedding, HEADS, "embedding")
        layers.ignore("embed_tokens.weight")  # a copy of the model's, which training leaves as it is
        self._fc = layers.linear([("fc", size)], 2 * size, bias=has_bias("fc", layers, by_config=config.fc_bias))
        self._layer = HeadLayer("layers.0", config.layer, layers, norm="", qkv_bias=config.qkv_bias)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target_norm(hidden)

    def forward(self, run: ForwardPass, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self._layer(run, self._fc(torch.cat((self._embedding(tokens), features), -1)))

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target_greedy(hidden)
