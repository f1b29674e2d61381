"""Whole engines with a speculator: whatever it proposes, the output is that of decoding one token after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.core import Engine, SamplingParams
from engine.core.errors import PluginFaultError
from engine.core.generation import Completion
from engine.core.speculators import SpeculatedSequence, Speculator
from engine.core.types import SpeculationStats
from engine.testing.checkpoints import make_checkpoint
from tests.core.told_speculator import Told

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True, seed=5)
PROMPTS = [tuple((7 * row + 3 * column) % 256 for column in range(5 + 13 * row)) for row in range(5)]
QUALITIES = (0, 3, 1)
"""Every how many tokens a draft is wrong: never, every third, always."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    Told.tell({})
    yield
    Told.tell({})


def build(checkpoint: Path, **settings: Any) -> Engine:
    common = {
        "executor__device": "cpu",
        "cache__memory": "8MiB",
        "model__max_len": 256,
        "model__dtype": "float32",
        "speculator": Told,
        "speculator__length": "fixed",
    }
    return Engine(model=str(checkpoint), **{**common, **settings})


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Engine]:
    with build(checkpoint, speculator__max_drafts=4) as engine:
        yield engine


def tokens_of(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [done.token_ids for done in engine.generate(PROMPTS, params)]


def told(outputs: Sequence[Sequence[int]]) -> Mapping[tuple[int, ...], Sequence[int]]:
    return dict(zip(PROMPTS, outputs, strict=True))


def speculation(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


@pytest.fixture(scope="module")
def expected(shared: Engine) -> list[tuple[int, ...]]:
    """Outputs without proposals."""
    return tokens_of(shared)


@pytest.mark.parametrize(
    "settings",
    [
        {"speculator__max_drafts": 1},
        {"speculator__max_drafts": 8, "scheduler__overlap": "on"},
        {"scheduler__max_batch_tokens": 11},
        {"cache__prefix_caching": False, "cache__block_size": 4},
        {"scheduler": "multi_step", "scheduler__overlap": "on"},
    ],
    ids=["one draft", "overlap", "chunks", "small blocks", "multi-step"],
)
def test_tokens_are_those_without_drafts(
    checkpoint: Path, expected: list[tuple[int, ...]], settings: dict[str, Any]
) -> None:
    with build(checkpoint, **settings) as engine:
        for wrong_every in QUALITIES:
            Told.tell(told(expected), wrong_every)
            assert tokens_of(engine) == expected
        assert sum(speculation(engine).accepted) > 0


def test_tokens_are_those_without_drafts_when_requests_are_preempted(
    checkpoint: Path, shared: Engine, expected: list[tuple[int, ...]]
) -> None:
    bytes_per_block = shared.cache_info.kv_bytes // shared.cache_info.num_blocks
    Told.tell(told(expected), 3)
    with build(checkpoint, model__max_len=128, cache__memory=str(9 * bytes_per_block)) as engine:
        assert tokens_of(engine) == expected
        assert engine.stats().preemptions > 0
        assert sum(speculation(engine).accepted) > 0


def test_perfect_drafts_save_steps(shared: Engine, expected: list[tuple[int, ...]]) -> None:
    before = shared.stats().steps
    Told.tell(told(expected))
    assert tokens_of(shared) == expected
    assert shared.stats().steps - before <= 2 + -(-24 // 5)


@pytest.mark.parametrize("wrong_every", QUALITIES)
def test_drawn_tokens_of_a_seed_are_those_without_drafts(shared: Engine, wrong_every: int) -> None:
    alone = tokens_of(shared, DRAWN)
    Told.tell(told(alone), wrong_every)
    assert tokens_of(shared, DRAWN) == alone


def test_logprobs_and_bias_are_those_without_drafts(shared: Engine) -> None:
    params = attrs.evolve(DRAWN, logprobs=2, logit_bias=((7, 3.0), (9, -50.0)))
    alone = shared.generate(PROMPTS, params)
    Told.tell(told([one.token_ids for one in alone]), 3)
    before = sum(speculation(shared).accepted)
    for one, other in zip(shared.generate(PROMPTS, params), alone, strict=True):
        assert one.token_ids == other.token_ids
        assert entries(one) == pytest.approx(entries(other), abs=1e-4)
    assert sum(speculation(shared).accepted) > before


def entries(done: Completion) -> list[float]:
    return [number for entry in done.logprobs or () for number in (entry.token, entry.logprob, entry.rank)]


@pytest.mark.parametrize("at", range(1, 6))
def test_output_ends_where_it_ends_without_drafts(shared: Engine, expected: list[tuple[int, ...]], at: int) -> None:
    stop = attrs.evolve(GREEDY, stop_token_ids=(expected[2][at],), min_tokens=min(at, 3))
    [alone] = shared.generate([PROMPTS[2]], stop)
    assert alone.finish_reason == "stop" or at == 2  # banned there by min_tokens
    Told.tell(told(expected))
    [done] = shared.generate([PROMPTS[2]], stop)
    assert (done.token_ids, done.finish_reason) == (alone.token_ids, alone.finish_reason)
    [done] = shared.generate([PROMPTS[2]], attrs.evolve(GREEDY, max_tokens=at))
    assert (done.token_ids, done.finish_reason) == (expected[2][:at], "length")


@pytest.mark.parametrize("base", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "edits",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"frequency_penalty": -1.0},
        {"min_tokens": 12, "ignore_eos": False},
    ],
    ids=lambda edits: next(iter(edits)),
)
def test_edits_by_the_outputs_so_far_are_those_without_drafts(
    shared: Engine, base: SamplingParams, edits: dict[str, Any]
) -> None:
    params = attrs.evolve(base, **edits)
    alone = tokens_of(shared, params)
    if "min_tokens" in edits:
        params = attrs.evolve(params, stop_token_ids=tuple({token for tokens in alone for token in tokens[2:14]}))
        alone = tokens_of(shared, params)
        assert all(len(tokens) >= 12 for tokens in alone)
        assert any(len(tokens) < 24 for tokens in alone)
    else:
        assert alone != tokens_of(shared, base)
    before = sum(speculation(shared).accepted)
    for wrong_every in QUALITIES:
        Told.tell(told(alone), wrong_every)
        assert tokens_of(shared, params) == alone
    assert sum(speculation(shared).accepted) >= before + 50


def test_a_stop_string_waits_for_min_tokens_amid_accepted_drafts(shared: Engine) -> None:
    tokens = tuple(shared.tokenizer.encode("abcdefghij" * 2, add_special_tokens=False))
    bias = dict.fromkeys(tokens, 60.0)
    params = attrs.evolve(GREEDY, logit_bias=bias, frequency_penalty=2.0)
    [whole] = shared.generate([PROMPTS[0]], params)
    for at in range(1, 20, 3):
        params = attrs.evolve(params, stop=(whole.text[at],), min_tokens=at + 2)
        Told.tell({})
        [alone] = shared.generate([PROMPTS[0]], params)
        Told.tell({PROMPTS[0]: whole.token_ids})
        [done] = shared.generate([PROMPTS[0]], params)
        assert (done.text, done.finish_reason) == (alone.text, alone.finish_reason)


def test_windows_keep_what_tokens_after_rejected_drafts_attend_to(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4, "layer_types": layers}
    path = make_checkpoint(tmp_path, "qwen2", tokenizer=True, **window)
    settings = {"cache__block_size": 4, "scheduler__max_batch_tokens": 30, "attention": "torch"}
    with build(path, **settings, speculator__max_drafts=7) as engine:
        alone = tokens_of(engine)
        for wrong_every in QUALITIES:
            Told.tell(told(alone), wrong_every)
            assert tokens_of(engine) == alone
        assert len(engine.cache_info.kinds) == 2
        assert sum(speculation(engine).accepted) > 0


class Failing(Speculator):
    """Fails once it is asked about a request."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        if sequence.request_id != "rehearsal":
            raise LookupError("no table")
        return ()


class FailingAtOnce(Told):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        raise LookupError("no table")


def test_requests_go_on_when_the_speculator_fails(
    checkpoint: Path, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with build(checkpoint, speculator=Failing) as engine:
        assert tokens_of(engine) == expected
        assert speculation(engine).faults > 0
    assert "speculator 'Failing' passed in from Python failed in propose(): LookupError: no table" in caplog.text


def test_engine_refuses_a_speculator_that_fails_in_its_rehearsal(checkpoint: Path) -> None:
    with pytest.raises(PluginFaultError, match=r"'FailingAtOnce'.* failed in propose\(\): LookupError: no table"):
        build(checkpoint, speculator=FailingAtOnce)
