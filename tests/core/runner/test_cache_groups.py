"""Models of several cache groups, and of windows, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint

WINDOW = 20
STEPS = 40
PROMPTS = [
    [(11 * row + 5 * column + row * column) % 500 for column in range(length)]
    for row, length in enumerate((230, 3, 61, 150))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", {"sliding_window": WINDOW}),
    "mixed": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


def generated(path: Path) -> list[list[int]]:
    """The tokens that transformers generates from each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=STEPS,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]


class Windowed:
    """A checkpoint with windows, and the tokens that transformers generates."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        architecture, config = CONFIGS[name]
        self.path = make_checkpoint(directory, architecture, tokenizer=True, **config)
        self.expected = generated(self.path)

    def engine(self, **settings: Any) -> Engine:
        usual = {
            "executor__device": "cpu",
            "cache__memory": "8MiB",
            "cache__block_size": 8,
            "scheduler__max_batch_tokens": 48,
            "attention": "torch",
        }
        return Engine(model=str(self.path), **usual | settings)


@pytest.fixture(scope="module", params=CONFIGS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    return Windowed(tmp_path_factory.mktemp("model") / "model", request.param)


def tokens_of(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(completion.token_ids) for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("attention", ["torch", "native"])
def test_greedy_tokens_equal_transformers_with_contexts_many_times_the_window(
    windowed: Windowed, attention: str
) -> None:
    with windowed.engine(attention=attention) as engine:
        assert tokens_of(engine) == windowed.expected
        assert engine.stats().prefix_hits == 0
        assert tokens_of(engine) == windowed.expected
        assert engine.stats().prefix_hits > 400, "the second run found no prefixes"
        assert engine.stats().blocks_used == 0


def test_greedy_tokens_equal_transformers_when_sequences_are_preempted(windowed: Windowed) -> None:
    memory = {"windows": "44KiB", "mixed": "140KiB"}[windowed.name]  # little more than one context takes
    with windowed.engine(cache__memory=memory, model__max_len=288, scheduler="multi_step") as engine:
        assert tokens_of(engine, [PROMPTS[1]] * 6) == [windowed.expected[1]] * 6
        assert engine.stats().preemptions > 0
