"""The multi_step policy in an engine: the same greedy tokens under stops, aborts, arrivals and preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, Request, SamplingParams
from engine.testing.checkpoints import make_checkpoint

PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
LENGTH = 30
ABORTED = 3
"""The request that is aborted."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def build(checkpoint: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), **common, **settings)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """Output of each prompt run alone, one iteration per step."""
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with build(checkpoint) as engine:
        return [engine.generate([prompt], greedy)[0].token_ids for prompt in PROMPTS]


def wanted(row: int, tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """A stop token for the request, at another position for each request, and the output up to the stop token."""
    stop = tokens[6 + 3 * row]
    return stop, tokens[: tokens.index(stop) + 1]


def turns(engine: Engine, tokens: dict[str, list[int]]) -> Iterator[None]:
    """Step until all requests have finished, gathering tokens by request."""
    while engine.has_work:
        for output in engine.step():
            tokens[output.request] += output.tokens
        yield


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("steps", [1, 4, 8, "auto"])
def test_multi_step_output_is_unchanged_by_stops_aborts_and_arrivals(
    checkpoint: Path, expected: list[tuple[int, ...]], steps: int | str, overlap: str
) -> None:
    settings = {"scheduler": "multi_step", "scheduler__options": {"steps": steps}, "scheduler__overlap": overlap}
    tokens: dict[str, list[int]] = {str(row): [] for row in range(len(PROMPTS))}
    late = list(range(2, len(PROMPTS)))

    with build(checkpoint, **settings) as engine:

        def add(row: int) -> None:
            stop, _ = wanted(row, expected[row])
            params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, stop_token_ids=(stop,))
            engine.add(Request(id=str(row), prompt=tuple(PROMPTS[row]), params=params))

        add(0)
        add(1)
        aborted = False
        for _ in turns(engine, tokens):
            if late:
                add(late.pop(0))
            if not aborted and len(tokens[str(ABORTED)]) > 4:
                assert engine.abort(str(ABORTED)) is not None
                aborted = True
        stats = engine.stats()

    for row, whole in enumerate(expected):
        _, output = wanted(row, whole)
        got = tuple(tokens[str(row)])
        if row == ABORTED:
            assert 4 < len(got) < len(output)
            assert got == output[: len(got)]
        else:
            assert got == output
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_multi_step_step_counts_as_one_step(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    counts = {}
    for steps in (1, 8):
        with build(checkpoint, scheduler="multi_step", scheduler__options={"steps": steps}) as engine:
            assert engine.generate([PROMPTS[0]], greedy)[0].token_ids == expected[0]
            counts[steps] = engine.stats().steps
    assert counts == {1: LENGTH, 8: 1 + 4}, "the prompt with its first token, then 8, 8, 8 and the 5 that are left"


def test_multi_step_output_is_unchanged_by_preemption(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    bytes_per_block = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, kv heads, head_dim, block_size, float32
    common: dict[str, Any] = {"executor__device": "cpu", "model__max_len": 128, "scheduler": "multi_step"}
    with Engine(model=str(checkpoint), cache__memory=str(9 * bytes_per_block), **common) as engine:
        assert [completion.token_ids for completion in engine.generate(PROMPTS, greedy)] == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().blocks_used == 0
