from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.core import Engine
from engine.core.errors import ConfigError
from engine.quantize.perplexity import measure, perplexity, windows


@pytest.mark.parametrize(
    ("count", "context", "stride"), [(100, 32, 16), (100, 32, 31), (33, 32, 1), (20, 32, 8), (2, 8, 4)]
)
def test_each_token_but_the_first_is_scored_once(count: int, context: int, stride: int) -> None:
    scored = []
    for begin, end, first in windows(count, context, stride):
        assert end - begin <= context
        assert first > begin
        assert begin == 0 or first - begin >= context - stride
        scored += range(first, end)
    assert scored == list(range(1, count))


def test_perplexity_equals_transformers(model: Path) -> None:
    """The reference computes each token's loss by a forward pass of its own."""
    tokens = [(7 * i + i * i) % 500 for i in range(150)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    with torch.no_grad():
        for token in range(1, 150):
            begin = max(0, -(-(token + 1 - 64) // 32) * 32)  # the first window that holds it
            logits = reference(torch.tensor([tokens[begin:token]])).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[tokens[token]])
    with Engine(str(model), executor__device="cpu", cache__memory="8MiB") as engine:
        seen: list[tuple[int, int]] = []
        found = measure(engine, tokens, context=64, stride=32, on_progress=lambda *now: seen.append(now))
    assert seen[0] == (1, 4)
    assert seen[-1] == (4, 4)
    assert found.tokens == 149
    assert found.loss == pytest.approx(total / 149, rel=1e-4)


def test_windows_that_do_not_fit_are_an_error(model: Path) -> None:
    settings = {"executor__device": "cpu", "cache__memory": "8MiB"}
    with pytest.raises(ConfigError, match=r"--context 512 does not fit the model's 512; use 511"):
        perplexity(model, "some text", context=512, stride=256, **settings)
    with pytest.raises(ConfigError, match="windows of 64 tokens cannot have a stride of 64"):
        perplexity(model, "some text", context=64, stride=64, **settings)
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        perplexity(model, "a", context=64, stride=32, **settings)
