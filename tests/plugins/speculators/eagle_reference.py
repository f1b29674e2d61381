"""EAGLE-1 heads of random weights, and what they propose, in plain torch: without a cache, from the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from .decoder_reference import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_CONFIG,
    Target,
    Weights,
    attention,
    gated_mlp,
    rms_norm,
)


def write_heads(
    directory: Path, *, fc_bias: bool = False, qkv_bias: bool = False, **config: Any
) -> dict[str, torch.Tensor]:
    """Write heads, and return their tensors. fc_bias, qkv_bias: with those biases. config: further keys of config.json,
    or keys without a value (...) that it lacks."""
    random = Weights(2)
    tensors = {"fc.weight": random.matrix(HIDDEN, 2 * HIDDEN) / 2, **random.layer("layers.0")}
    if fc_bias:
        tensors["fc.bias"] = random.bias(HIDDEN)
    if qkv_bias:
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        tensors |= {f"layers.0.self_attn.{part}_proj.bias": random.bias(size) for part, size in sizes.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYER_CONFIG, **config}
    content = {key: value for key, value in content.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(content))
    return tensors


class Reference:
    """Proposals of heads for a target of transformers, each computed from the first token on."""

    def __init__(self, target: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.target = Target(target)
        self._weights = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}

    @torch.inference_mode()
    def outputs(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The layer over all rows: [rows, HIDDEN]. hidden: [rows, HIDDEN]; tokens: the one after each row."""
        weights = self._weights
        both = torch.cat((self.target.embedding[torch.tensor(list(tokens))], hidden), -1)
        joined = F.linear(both, weights["fc"], weights.get("fc.bias"))
        residual = joined + attention(joined, weights, "layers.0.self_attn", None)
        normed = rms_norm(residual, weights["layers.0.post_attention_layernorm"])
        return residual + gated_mlp(normed, weights, "layers.0.mlp")

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens proposed after `tokens`, of which the target has computed all but the last."""
        hidden, following = self.target.normed(self.target.states(tokens[:-1])[-1]), list(tokens[1:])
        found: list[int] = []
        while len(found) < count:
            last = self.outputs(hidden, following)[-1:]
            found.append(int((last @ self.target.head.T).argmax()))
            hidden, following = torch.cat((hidden, last)), [*following, found[-1]]
        return found
