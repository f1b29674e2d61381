"""A target of transformers, and one decoder layer of drafting heads in plain torch, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, VOCABULARY = 64, 4, 2, 16, 96, 512
EPS, THETA = 1e-5, 10000.0
LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
}


class Target:
    """A model of transformers."""

    def __init__(self, directory: Path) -> None:
        import transformers

        library: Any = transformers
        self._model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.embedding: torch.Tensor = self._model.get_input_embeddings().weight.detach()
        """[VOCABULARY, HIDDEN]."""
        self.head: torch.Tensor = self._model.lm_head.weight.detach()
        """[VOCABULARY, HIDDEN]."""

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The hidden states that enter each layer, and last what leaves the last one: each [tokens, HIDDEN]."""
        found: list[torch.Tensor] = []
        norm = self._model.model.norm
        hook = norm.register_forward_pre_hook(lambda module, arguments: found.append(arguments[0][0]))
        try:
            outputs = self._model(torch.tensor([list(tokens)]), output_hidden_states=True)
        finally:
            hook.remove()
        return [*(state[0] for state in outputs.hidden_states[:-1]), *found]

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's last norm of [rows, HIDDEN]."""
        normed: torch.Tensor = self._model.model.norm(hidden)
        return normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x / root mean square(x) * weight, over the last dimension."""
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [tokens, heads, DIM], halves paired."""
    frequencies = THETA ** -(torch.arange(0, DIM, 2).double() / DIM)
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    cos, sin = (torch.cat((part, part), -1)[:, None].float() for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attention(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, window: int | None) -> torch.Tensor:
    """Causal attention over all rows, with its output projection: [rows, inputs] -> [rows, HIDDEN].

    weights: by name, without .weight; biases with .bias. name: of the attention module. window: sliding window.
    """
    rows = len(x)

    def project(part: str, y: torch.Tensor) -> torch.Tensor:
        return F.linear(y, weights[f"{name}.{part}_proj"], weights.get(f"{name}.{part}_proj.bias"))

    q, k, v = project("q", x), project("k", x), project("v", x)
    q, k, v = q.view(rows, HEADS, DIM), k.view(rows, KV_HEADS, DIM), v.view(rows, KV_HEADS, DIM)
    if f"{name}.q_norm" in weights:
        q, k = rms_norm(q, weights[f"{name}.q_norm"]), rms_norm(k, weights[f"{name}.k_norm"])
    q, k = rotated(q), rotated(k)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
    hidden_keys = torch.ones(rows, rows).triu(1).bool()
    if window is not None:
        hidden_keys |= torch.ones(rows, rows).tril(-window).bool()
    scores = scores.masked_fill(hidden_keys, -torch.inf)
    return project("o", torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(rows, -1))


def gated_mlp(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)): [rows, HIDDEN] -> [rows, HIDDEN]."""
    gate, up = x @ weights[f"{name}.gate_proj"].T, x @ weights[f"{name}.up_proj"].T
    return (F.silu(gate) * up) @ weights[f"{name}.down_proj"].T


class Weights:
    """Random weights, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Of a linear layer."""
        return torch.randn(rows, columns, generator=self._random) * 2 / columns**0.5

    def norm(self, size: int = HIDDEN) -> torch.Tensor:
        """Of a norm, about 1."""
        return 1 + torch.randn(size, generator=self._random) / 5

    def bias(self, size: int) -> torch.Tensor:
        """Of a linear layer."""
        return torch.randn(size, generator=self._random)

    def layer(self, name: str, inputs: int = HIDDEN) -> dict[str, torch.Tensor]:
        """A decoder layer without its input norm. inputs: size of what its attention projects."""
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return {
            f"{attention}.q_proj.weight": self.matrix(HEADS * DIM, inputs),
            f"{attention}.k_proj.weight": self.matrix(KV_HEADS * DIM, inputs),
            f"{attention}.v_proj.weight": self.matrix(KV_HEADS * DIM, inputs),
            f"{attention}.o_proj.weight": self.matrix(HIDDEN, HEADS * DIM),
            f"{name}.post_attention_layernorm.weight": self.norm(),
            f"{mlp}.gate_proj.weight": self.matrix(MIDDLE, HIDDEN),
            f"{mlp}.up_proj.weight": self.matrix(MIDDLE, HIDDEN),
            f"{mlp}.down_proj.weight": self.matrix(HIDDEN, MIDDLE),
        }

    def permutation(self, size: int) -> torch.Tensor:
        """The numbers below `size`, in random order."""
        return torch.randperm(size, generator=self._random)
