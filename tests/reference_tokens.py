"""Logits and greedy tokens by transformers, the reference for those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def greedy_tokens(path: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """What transformers generates in float32 from each prompt alone: exactly `steps` tokens."""
    model = _load(path)
    return [_generate(model, prompt, steps) for prompt in prompts]


@torch.inference_mode()
def logits_and_greedy_tokens(path: Path, prompt: Sequence[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """What transformers generates in float32, and the logits of prompt and new tokens: [tokens, vocab_size]."""
    model = _load(path, attn_implementation="eager")
    tokens = _generate(model, prompt, steps)
    return model(torch.tensor([[*prompt, *tokens]])).logits[0], tokens


def _load(path: Path, **settings: Any) -> Any:
    library: Any = transformers  # without types
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()
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
