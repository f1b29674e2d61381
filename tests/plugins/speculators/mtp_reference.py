"""A MiMo model of random weights with MTP heads, and what these propose, in plain torch: without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.testing.checkpoints import make_checkpoint

from .decoder_reference import DIM, EPS, HEADS, HIDDEN, KV_HEADS, THETA, Target, Weights, attention, gated_mlp, rms_norm

NAME = "model.mtp_layers.0"


def write_model(directory: Path, **config: Any) -> dict[str, torch.Tensor]:
    """Write a model, which transformers reads as Qwen2 in `directory`/qwen2; return the tensors of its heads.

    config: further keys of config.json, or keys without a value (...) that it lacks.
    """
    qwen2 = make_checkpoint(
        directory / "qwen2",
        "qwen2",
        tokenizer=True,
        rms_norm_eps=EPS,
        rope_parameters={"rope_theta": THETA, "rope_type": "default"},
    )
    random = Weights(3)
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    heads = {
        f"{NAME}.token_layernorm.weight": random.norm(),
        f"{NAME}.hidden_layernorm.weight": random.norm(),
        f"{NAME}.input_proj.weight": random.matrix(HIDDEN, 2 * HIDDEN),
        f"{NAME}.input_layernorm.weight": random.norm(),
        **random.layer(NAME),
        **{f"{NAME}.self_attn.{part}_proj.bias": random.bias(size) for part, size in sizes.items()},
        f"{NAME}.final_layernorm.weight": random.norm(),
    }
    for file in qwen2.iterdir():
        if file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file({**load_file(qwen2 / "model.safetensors"), **heads}, directory / "model.safetensors")
    content = json.loads((qwen2 / "config.json").read_text())
    content |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    content |= {"num_nextn_predict_layers": 1, "use_mrope": False, **config}
    content = {key: value for key, value in content.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(content))
    return heads


class Reference:
    """Proposals of heads, each computed from the first token on."""

    def __init__(self, directory: Path, heads: dict[str, torch.Tensor]) -> None:
        self.target = Target(directory / "qwen2")
        self._weights = {name.removesuffix(".weight"): tensor for name, tensor in heads.items()}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{NAME}.{name}"])

    @torch.inference_mode()
    def outputs(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The layer over all rows: [rows, HIDDEN]. hidden: [rows, HIDDEN]; tokens: the one after each row."""
        embedded = self.target.embedding[torch.tensor(list(tokens))]
        both = torch.cat((self._norm(hidden, "hidden_layernorm"), self._norm(embedded, "token_layernorm")), -1)
        joined = both @ self._weights[f"{NAME}.input_proj"].T
        normed = self._norm(joined, "input_layernorm")
        residual = joined + attention(normed, self._weights, f"{NAME}.self_attn", None)
        return residual + gated_mlp(self._norm(residual, "post_attention_layernorm"), self._weights, f"{NAME}.mlp")

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens proposed after `tokens`, of which the target has computed all but the last."""
        hidden, following = self.target.states(tokens[:-1])[-1], list(tokens[1:])
        found: list[int] = []
        while len(found) < count:
            last = self.outputs(hidden, following)[-1:]
            found.append(int((self._norm(last, "final_layernorm") @ self.target.head.T).argmax()))
            hidden, following = torch.cat((hidden, last)), [*following, found[-1]]
        return found
