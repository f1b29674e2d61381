"""EAGLE-3 heads of random weights, and what they propose, in plain torch: without a cache, from the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .decoder_reference import (
    DIM,
    HIDDEN,
    LAYER_CONFIG,
    VOCABULARY,
    Target,
    Weights,
    attention,
    gated_mlp,
    rms_norm,
)

DRAFTS = 200
LAYERS = (2, 4, 5)
"""Of a target of 8 layers: 2, n / 2 and n - 3."""


def write_heads(
    directory: Path,
    *,
    layout: str = "eagle",
    own_embedding: bool = False,
    layer_ids: Sequence[int] = (),
    qk_norm: bool = False,
    window: int | None = None,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Write heads in one of two layouts, eagle or speculators; return their tensors, by the names of the first.

    layer_ids: eagle_aux_hidden_state_layer_ids, if any. qk_norm: with norms of queries and keys, as a layer of Qwen3.
    window: sliding window of attention. config: further keys of config.json, which may ask for norms.
    """
    random = Weights(1)
    tensors = {
        "fc.weight": random.matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": random.norm(),
        "midlayer.input_layernorm.weight": random.norm(),
        **random.layer("midlayer", 2 * HIDDEN),
        "norm.weight": random.norm(),
        "lm_head.weight": random.matrix(DRAFTS, HIDDEN),
        "d2t": random.permutation(VOCABULARY)[:DRAFTS].sort().values - torch.arange(DRAFTS),
    }
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
    tensors["t2d"][torch.arange(DRAFTS) + tensors["d2t"]] = True
    flags = {**config, **config.get("eagle_config", {})}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(3 * HIDDEN)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{place}.weight": random.norm() for place in range(3)}
    if qk_norm:
        tensors |= {f"midlayer.self_attn.{part}_norm.weight": random.norm(DIM) for part in "qk"}
    if own_embedding:
        tensors["embed_tokens.weight"] = random.matrix(VOCABULARY, HIDDEN) * 8
    names = {name: name if layout == "eagle" else name.replace("midlayer.", "layers.0.") for name in tensors}
    directory.mkdir(parents=True, exist_ok=True)
    save_file({names[name]: tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    content: dict[str, Any] = {"draft_vocab_size": DRAFTS, **config}
    layer = dict(LAYER_CONFIG)
    if window is not None:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    if layer_ids:
        content["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    if layout == "eagle":
        content |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer}
    else:
        content |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    (directory / "config.json").write_text(json.dumps(content))
    return tensors


class Reference:
    """Proposals of heads for a target of transformers, each computed from the first token on."""

    def __init__(
        self,
        target: Path,
        tensors: dict[str, torch.Tensor],
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        window: int | None = None,
    ) -> None:
        self.target = Target(target)
        self._weights = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        self._norm_before_residual = norm_before_residual
        self._norm_output = norm_output
        self._window = window

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[name])

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int], layers: Sequence[int] = LAYERS) -> torch.Tensor:
        """What the heads take of each token: [tokens, HIDDEN]."""
        states = self.target.states(tokens)
        parts = [states[layer] for layer in layers]
        if "fc_norm.0" in self._weights:
            parts = [self._norm(part, f"fc_norm.{place}") for place, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if "input_norm" in self._weights:
            joined = self._norm(joined, "input_norm")
        return joined @ self._weights["fc"].T

    @torch.inference_mode()
    def outputs(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The layer over all rows: [rows, HIDDEN]. hidden: [rows, HIDDEN]; tokens: the one after each row."""
        weights, norm = self._weights, self._norm
        table = weights.get("embed_tokens", self.target.embedding)
        normed = norm(hidden, "midlayer.hidden_norm")
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat((norm(table[torch.tensor(list(tokens))], "midlayer.input_layernorm"), normed), -1)
        residual = residual + attention(both, weights, "midlayer.self_attn", self._window)
        return residual + gated_mlp(norm(residual, "midlayer.post_attention_layernorm"), weights, "midlayer.mlp")

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], count: int, layers: Sequence[int] = LAYERS) -> list[int]:
        """The tokens proposed after `tokens`, of which the target has computed all but the last."""
        hidden, following = self.inputs(tokens[:-1], layers), list(tokens[1:])
        found: list[int] = []
        while len(found) < count:
            last = self.outputs(hidden, following)[-1:]
            normed = self._norm(last, "norm")
            draft = int((normed @ self._weights["lm_head"].T).argmax())
            found.append(draft + int(self._weights["d2t"][draft]))
            last = normed if self._norm_output else last
            hidden, following = torch.cat((hidden, last)), [*following, found[-1]]
        return found
