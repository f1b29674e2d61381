"""EAGLE-3 heads of random weights, and what they propose, in plain torch: without a cache, from the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, DRAFTS, VOCABULARY = 64, 4, 2, 16, 96, 200, 512
EPS, THETA = 1e-5, 10000.0
LAYERS = (2, 4, 5)
"""Of a target of 8 layers: 2, n / 2 and n - 3."""
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
    random = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 2 / columns**0.5

    def norm(size: int = HIDDEN) -> torch.Tensor:
        return 1 + torch.randn(size, generator=random) / 5

    tensors = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": matrix(MIDDLE, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(MIDDLE, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, MIDDLE),
        "norm.weight": norm(),
        "lm_head.weight": matrix(DRAFTS, HIDDEN),
        "d2t": torch.randperm(VOCABULARY, generator=random)[:DRAFTS].sort().values - torch.arange(DRAFTS),
    }
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
    tensors["t2d"][torch.arange(DRAFTS) + tensors["d2t"]] = True
    flags = {**config, **config.get("eagle_config", {})}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * HIDDEN)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{place}.weight": norm() for place in range(3)}
    if qk_norm:
        tensors |= {f"midlayer.self_attn.{part}_norm.weight": norm(DIM) for part in "qk"}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(VOCABULARY, HIDDEN) * 8
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
        import transformers

        library: Any = transformers
        self._target = library.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._weights = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        self._norm_before_residual = norm_before_residual
        self._norm_output = norm_output
        self._window = window

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self._weights[name]

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int], layers: Sequence[int] = LAYERS) -> torch.Tensor:
        """What the heads take of each token: [tokens, HIDDEN]."""
        states = self._target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        parts = [states[layer][0] for layer in layers]
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
        table = weights.get("embed_tokens", self._target.get_input_embeddings().weight)

        normed = norm(hidden, "midlayer.hidden_norm")
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat((norm(table[torch.tensor(list(tokens))], "midlayer.input_layernorm"), normed), -1)
        q, k, v = (both @ weights[f"midlayer.self_attn.{name}_proj"].T for name in "qkv")
        rows = len(hidden)
        q, k = q.view(rows, HEADS, DIM), k.view(rows, KV_HEADS, DIM)
        if "midlayer.self_attn.q_norm" in weights:
            q, k = norm(q, "midlayer.self_attn.q_norm"), norm(k, "midlayer.self_attn.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = (part.view(rows, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
        hidden_keys = torch.ones(rows, rows).triu(1).bool()
        if self._window is not None:
            hidden_keys |= torch.ones(rows, rows).tril(-self._window).bool()
        scores = scores.masked_fill(hidden_keys, -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(rows, -1)
        residual = residual + attended @ weights["midlayer.self_attn.o_proj"].T
        x = norm(residual, "midlayer.post_attention_layernorm")
        gate, up = x @ weights["midlayer.mlp.gate_proj"].T, x @ weights["midlayer.mlp.up_proj"].T
        return residual + (F.silu(gate) * up) @ weights["midlayer.mlp.down_proj"].T

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


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [tokens, heads, DIM], halves paired."""
    frequencies = THETA ** -(torch.arange(0, DIM, 2).double() / DIM)
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    cos, sin = (torch.cat((part, part), -1)[:, None].float() for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
