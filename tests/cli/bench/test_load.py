"""Loads: the same work each time."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from engine.cli.bench.load import Load, make_load, opened, parse_counts, parse_range, random_tokens, run_load
from engine.core import Engine, EngineConfig
from engine.core.config.tree import CacheConfig, ExecutorConfig, ModelConfig
from engine.core.errors import ConfigError


@pytest.mark.parametrize(("text", "bounds"), [("512", (512, 512)), ("100-1024", (100, 1024)), ("7-7", (7, 7))])
def test_lengths_are_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    assert parse_range(text, "--input-len") == bounds


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "-5", "1-2-3", "5-"])
def test_other_lengths_are_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_range(text, "--input-len")


def test_counts_are_a_list_without_repetition() -> None:
    assert parse_counts("8, 1,8,32", "--batch") == (8, 1, 32)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "x", "-1", "1.5"])
def test_other_counts_are_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        parse_counts(text, "--batch")


def test_a_load_is_the_same_each_time_but_its_tokens_are_not() -> None:
    load = make_load(5, (3, 9), (2, 4), seed=1)
    assert load == make_load(5, (3, 9), (2, 4), seed=1) != make_load(5, (3, 9), (2, 4), seed=2)
    first, again, other = load.prompts(100, "a"), load.prompts(100, "a"), load.prompts(100, "b")
    assert first == again
    assert list(map(len, first)) == list(map(len, other)) == [inputs for inputs, _ in load.lengths]
    assert first[0] != other[0]


def test_the_uneven_load_draws_all_prompts_before_all_outputs() -> None:
    draw = random.Random(0)
    inputs = [draw.randint(100, 1024) for _ in range(256)]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    load = make_load(256, (100, 1024), (100, 1024), seed=0)
    assert load.lengths == tuple(zip(inputs, outputs, strict=True))
    assert load.name == "256 requests, 100-1024 in / 100-1024 out"
    assert (load.prompt_tokens, load.output_tokens) == (sum(inputs), sum(outputs))


@pytest.mark.parametrize(("vocab_size", "low", "high"), [(2, 1, 1), (11, 10, 10), (64, 10, 63), (10**6, 10, 99_999)])
def test_tokens_are_in_the_vocabulary_and_not_among_its_first(vocab_size: int, low: int, high: int) -> None:
    tokens = random_tokens(random.Random(0), 2000, vocab_size)
    assert low <= min(tokens) <= max(tokens) <= high
    assert max(tokens) - min(tokens) >= (high - low) * 0.9


def test_what_is_measured_is_what_was_asked_for(tiny: Path) -> None:
    load = make_load(4, (3, 9), (2, 4), seed=0)
    with Engine(model=str(tiny), executor__device="cpu", cache__memory="8MiB") as engine:
        run_load(engine, load, prefix="first-")
        measured = run_load(engine, load, prefix="second-")
    assert measured.prompt_tokens == sum(inputs for inputs, _ in load.lengths)
    assert measured.output_tokens == sum(outputs for _, outputs in load.lengths)
    assert measured.steps >= max(outputs for _, outputs in load.lengths)
    assert {"schedule", "submit", "wait", "commit", "prepare", "launch", "sample"} <= set(measured.phases)
    assert 0 < measured.phases["launch"] < measured.seconds


def test_requests_run_greedily_past_the_end_of_a_text() -> None:
    requests = list(Load(name="", lengths=((3, 2), (1, 5))).requests(100, "x-"))
    assert [request.id for request in requests] == ["x-0", "x-1"]
    assert [len(request.prompt) for request in requests] == [3, 1]
    assert [request.params.max_tokens for request in requests] == [2, 5]
    assert all(request.params.ignore_eos and request.params.temperature == 0 for request in requests)


def test_an_opened_engine_is_warm_and_leaves_the_collector_as_it_was(tiny: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(path=str(tiny), max_len=24),
        executor=ExecutorConfig(device="cpu"),
        cache=CacheConfig(memory="8MiB"),
    )
    with opened(config) as engine:
        assert engine.stats().generation_tokens == 8 * 8
        assert engine.stats().prompt_tokens == 8 * 12  # no longer than half of the context
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert not engine.check().ok
