"""What steps compile and capture because the start did not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.core.runner import first_uses
from engine.core.runner.first_uses import NOTHING, FirstUse, FirstUses
from engine.core.types import Request
from engine.testing.checkpoints import make_checkpoint


class Graphs:
    """Stands in for DecodeGraphs."""

    num_captured = 5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = ["compiled_at_start"]
    monkeypatch.setattr(first_uses, "_compiled_kernels", lambda: names)
    return names


def test_take_returns_what_came_since_the_last_call(kernels: list[str]) -> None:
    graphs: Any = Graphs()
    uses = FirstUses(counts_kernels=True, decode_graphs=graphs)
    assert uses.take() is NOTHING
    kernels += ["matrix_kernel", "draw_kernel"]
    graphs.num_captured += 1
    assert uses.take() == FirstUse(kernels=2, graphs=1)
    assert uses.take() is NOTHING


def test_take_logs_the_names_of_the_kernels(kernels: list[str], caplog: pytest.LogCaptureFixture) -> None:
    uses = FirstUses(counts_kernels=True, decode_graphs=None)
    kernels.append("matrix_kernel")
    with caplog.at_level("INFO"):
        uses.take()
    assert "compiled or loaded 1 kernels: matrix_kernel" in caplog.text


def test_kernels_are_noted_by_a_hook_of_triton_that_calls_the_hook_before(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    called: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **compiled: called.append(compiled["repr"]))
    first_uses._compiled_kernels.cache_clear()
    try:
        names = first_uses._compiled_kernels()
        knobs.runtime.jit_post_compile_hook(repr="matrix_kernel[num_warps=4](x)", key="", fn=None)
        assert names == ["matrix_kernel"]
        assert called == ["matrix_kernel[num_warps=4](x)"]
    finally:
        first_uses._compiled_kernels.cache_clear()


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": ((3, 1.5),), "min_tokens": 4},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def requests(count: int, vocab_size: int, max_len: int, kinds: list[dict[str, Any]]) -> Iterator[Request]:
    """Prompts of random lengths, two in three of them short, each with one of the kinds of sampling."""
    draw = random.Random(7)
    for number in range(count):
        length = draw.randint(1, max_len - 40 if number % 3 == 0 else 120)
        params = draw.choice(kinds) | {"max_tokens": draw.randint(4, 24), "ignore_eos": True, "seed": number}
        prompt = tuple(draw.randrange(vocab_size) for _ in range(length))
        yield Request(id=str(number), prompt=prompt, params=SamplingParams(**params))


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["none", "fp8", "int8"])
@pytest.mark.parametrize("kinds", [SAMPLING[:1], SAMPLING[1:2], SAMPLING], ids=["greedy", "drawn", "mixed"])
def test_a_load_compiles_and_captures_nothing(quant: str, kinds: list[dict[str, Any]], tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
    path = make_checkpoint(tmp_path / "model", "qwen3", tokenizer=True, max_position_embeddings=2048, **sizes)
    settings = {"scheduler__max_running": 48, "cache__memory": "1GiB", "model__dtype": "bfloat16"}
    names = first_uses._compiled_kernels()
    with Engine(model=str(path), executor__device="cuda", quant=quant, **settings) as engine:
        at_start = len(names)
        waiting = list(requests(160, engine.vocab_size, engine.max_len, kinds))
        for burst in (1, 2, 3, 5, 9, 12, 128):  # requests that arrive between two steps
            for _ in range(burst):
                engine.add(waiting.pop())
            while engine.has_work:
                engine.step()
        stats = engine.stats()
    assert names[at_start:] == []
    assert (stats.kernels_compiled, stats.graphs_captured) == (0, 0)
