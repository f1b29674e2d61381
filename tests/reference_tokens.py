"""Greedy tokens by transformers, the reference for those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


def greedy_tokens(path: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """What transformers generates in float32 from each prompt alone: exactly `steps` tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=steps,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
