"""Greedy tokens of each architecture, through the whole engine, against transformers' own generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint
from tests.reference_tokens import greedy_tokens

from .architectures import OTHERS

STEPS = 64
PROMPTS = [[(11 * row + 5 * column + row * column) % 500 for column in range(3 + 17 * row)] for row in range(4)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": 24}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"rope_parameters": YARN}),
    ],
)
def test_greedy_tokens_equal_transformers(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "model", architecture, tokenizer=True, **config)
    check(path, PROMPTS, STEPS, ("torch", "native"))


@pytest.mark.parametrize("architecture", OTHERS)
def test_greedy_tokens_of_other_families_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """Contexts beyond the sliding windows. The native backend decodes by its kernel, and prefills by PyTorch."""
    check(make_checkpoint(tmp_path / "model", architecture, tokenizer=True), PROMPTS[1:3], 16, ("native",))


def check(path: Path, prompts: list[list[int]], steps: int, backends: tuple[str, ...]) -> None:
    """Compare each prompt alone, and all in one batch."""
    wanted = greedy_tokens(path, prompts, steps)
    greedy = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    settings: dict[str, Any] = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "8MiB"}
    for attention in backends:
        with Engine(model=str(path), attention=attention, **settings) as engine:
            alone = [list(engine.generate([prompt], greedy)[0].token_ids) for prompt in prompts]
            together = [list(completion.token_ids) for completion in engine.generate(prompts, greedy)]
        assert alone == wanted
        assert together == wanted
