"""Logits and greedy tokens by transformers, the reference for those of an engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen

_library: Any = transformers  # without types
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(_library.LlamaForCausalLM.forward).parameters else "past_key_values"
)
"""The name of a model's argument for a cache: another one from transformers 5.24 on."""


@frozen(kw_only=True)
class GreedyReference:
    """What transformers computes in float32 for a prompt and the greedy tokens that follow."""

    tokens: list[int]
    """The greedy tokens."""
    logits: torch.Tensor
    """Of prompt and greedy tokens: [tokens, vocab_size]."""
    margin: float
    """Smallest distance of a greedy token's logit to the next lower one, in standard deviations of the logits."""
    routing_margin: float | None
    """Smallest distance of the router logits of a chosen and a rejected expert, in standard deviations of a layer's
    router logits. None for models without experts."""


def greedy_tokens(path: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """What transformers generates in float32 from each prompt alone: exactly `steps` tokens."""
    model = _load(path)
    return [_generate(model, prompt, steps) for prompt in prompts]


@torch.inference_mode()
def greedy_reference(
    path: Path, prompt: Sequence[int], steps: int, auto_class: str = "AutoModelForCausalLM"
) -> GreedyReference:
    """Greedy tokens and logits of a checkpoint. auto_class: the class of transformers that loads it."""
    model = _load(path, auto_class, attn_implementation="eager")
    tokens = _generate(model, prompt, steps)
    top_k = getattr(model.config, "num_experts_per_tok", None)
    more = {} if top_k is None else {"output_router_logits": True}
    result = model(torch.tensor([[*prompt, *tokens]]), **more)
    logits = result.logits[0]
    return GreedyReference(
        tokens=tokens,
        logits=logits,
        margin=_margin(logits[len(prompt) - 1 : -1], 1) / float(logits.std()),
        routing_margin=top_k
        and min(_margin(layer.flatten(0, -2), top_k) / float(layer.std()) for layer in result.router_logits),
    )


def _margin(rows: torch.Tensor, chosen: int) -> float:
    """Smallest distance, over the rows, of the lowest of the `chosen` largest values to the next lower one."""
    largest = rows.topk(chosen + 1).values
    return float((largest[:, -2] - largest[:, -1]).min())


def _load(path: Path, auto_class: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    model = getattr(_library, auto_class).from_pretrained(path, dtype=torch.float32, **settings).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _generate(model: Any, prompt: Sequence[int], steps: int) -> list[int]:
    whole = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=steps,
        pad_token_id=0,
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
