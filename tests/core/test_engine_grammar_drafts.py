"""Requests with grammars and drafts: whatever is proposed, the output is that of the same request without drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from engine.core.engine import Engine
from engine.core.generation import Completion
from engine.core.grammars.grammar import Grammar
from engine.core.speculators.grammar_drafts import GrammarDrafts
from engine.core.types import Request, SamplingParams
from tests.core.sampling.speculation_reference import chi_square
from tests.core.test_engine_grammars import PARENS, PATTERNS, PERSON, PROMPTS, SCHEMAS, few, make_engine, params
from tests.core.told_speculator import Told

QUALITIES = (0, 2, 3, 1)
"""Every how many tokens a draft is wrong: never, every second, every third, always."""
TOLD: dict[str, Any] = {"speculator": Told, "speculator__length": "fixed", "speculator__max_drafts": 4}


@pytest.fixture(params=["shortened", "as they are"])
def proposals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened by the grammar before they are verified, or not."""
    if request.param == "as they are":
        monkeypatch.setattr(GrammarDrafts, "choose", lambda self, output, proposal, limit: proposal)


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    Told.tell({})
    yield
    Told.tell({})


@pytest.fixture(scope="module", params=["uniproc", "multiproc"])
def engine(request: pytest.FixtureRequest, engine_checkpoint: Path) -> Iterator[Engine]:
    with make_engine(engine_checkpoint, executor=request.param, **TOLD) as made:
        yield made


@pytest.fixture(scope="module")
def uniproc(engine_checkpoint: Path) -> Iterator[Engine]:
    with make_engine(engine_checkpoint, **TOLD) as made:
        yield made


def told(outputs: Sequence[Completion], prompts: Sequence[tuple[int, ...]] = PROMPTS) -> Mapping[Any, Any]:
    return {prompt: done.token_ids for prompt, done in zip(prompts, outputs, strict=True)}


def accepted(engine: Engine) -> int:
    stats = engine.stats().speculation
    assert stats is not None
    return sum(stats.accepted)


def essence(done: Completion) -> Any:
    return done.token_ids, done.text, done.finish_reason, done.error


def check_same(engine: Engine, asked: SamplingParams, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[Completion]:
    """Outputs with drafts of every quality are those without; returns them."""
    Told.tell({})
    alone = engine.generate(prompts, asked)
    for wrong_every in QUALITIES:
        Told.tell(told(alone, prompts), wrong_every)
        for one, other in zip(engine.generate(prompts, asked), alone, strict=True):
            assert essence(one) == essence(other)
    return alone


@few
@given(schema=SCHEMAS)
def test_drafts_change_no_token_under_json_schemas(engine: Engine, proposals: None, schema: dict[str, Any]) -> None:
    for temperature in (0.0, 1.0):
        check_same(engine, params(Grammar.json_schema(schema), temperature=temperature, max_tokens=60))


@few
@given(pattern=PATTERNS)
def test_drafts_change_no_token_under_regular_expressions(engine: Engine, proposals: None, pattern: str) -> None:
    for temperature in (0.0, 1.0):
        check_same(engine, params(Grammar.regex(pattern), temperature=temperature, max_tokens=40))


@pytest.mark.parametrize("texts", [["yes", "no"], ["a", "ab", "abc"], ['"\\\n', "é🙂", "é🙃"]])
def test_choices_and_the_end_amid_accepted_drafts(engine: Engine, proposals: None, texts: list[str]) -> None:
    before = accepted(engine)
    for temperature in (0.0, 1.0):
        for done in check_same(engine, params(Grammar.choice(texts), temperature=temperature)):
            assert done.text in texts
            assert done.finish_reason == "stop"
    assert accepted(engine) > before


def test_drafts_after_the_end_change_nothing(uniproc: Engine, proposals: None) -> None:
    [end] = uniproc.checkpoint.eos_tokens()
    asked = params(Grammar.regex("[ab]{3}"), temperature=0.0)
    [alone] = uniproc.generate(PROMPTS[:1], asked)
    for more in ([end, end], [5, 6], [end, 5]):
        Told.tell({PROMPTS[0]: (*alone.token_ids, *more)})
        [done] = uniproc.generate(PROMPTS[:1], asked)
        assert essence(done) == essence(alone)


def test_perfect_drafts_save_steps(uniproc: Engine) -> None:
    asked = params(PERSON, temperature=0.0)
    alone = uniproc.generate(PROMPTS, asked)
    before = uniproc.stats().steps
    Told.tell(told(alone))
    uniproc.generate(PROMPTS, asked)
    assert uniproc.stats().steps - before <= 3 + max(len(done.token_ids) for done in alone) // 5


def test_forced_texts_are_drafts_without_a_proposal_too(engine_checkpoint: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"temperature": {"type": "boolean"}, "precipitation": {"enum": ["millimetres", "inches"]}},
        "required": ["temperature", "precipitation"],
        "additionalProperties": False,
    }
    asked = params(Grammar.json_schema(schema), temperature=0.0)
    compact = {"grammar__options": {"max_whitespace": 0}}
    with make_engine(engine_checkpoint, **compact) as plain:
        alone = plain.generate(PROMPTS, asked)
        plain_steps = plain.stats().steps
    with make_engine(engine_checkpoint, **TOLD, **compact) as engine:
        assert list(map(essence, engine.generate(PROMPTS, asked))) == list(map(essence, alone))
        assert engine.stats().steps < plain_steps - 10
        assert accepted(engine) > 10


def test_drafts_that_the_grammar_refuses_are_not_verified(uniproc: Engine) -> None:
    [token] = uniproc.tokenizer.encode("z", add_special_tokens=False)
    before = uniproc.stats().speculation
    Told.tell({PROMPTS[0]: (token,) * 30})
    [done] = uniproc.generate(PROMPTS[:1], params(Grammar.regex("[ab]{20,25}"), temperature=0.0))
    assert set(done.text) <= {"a", "b"}
    assert uniproc.stats().speculation == before


def test_a_prediction_counts_as_far_as_the_grammar_allows_it(uniproc: Engine) -> None:
    asked = params(Grammar.regex("[ab]{20,25}"), temperature=0.0)
    [alone] = uniproc.generate(PROMPTS[:1], asked)
    for prediction in (alone.token_ids, (*alone.token_ids[:3], 5, 6, 7)):
        uniproc.add(Request(id="one", prompt=PROMPTS[0], params=asked, prediction=prediction))
        outputs = []
        while uniproc.has_work:
            outputs += uniproc.step()
        assert tuple(token for output in outputs for token in output.tokens) == alone.token_ids
        assert outputs[-1].prediction_tokens is not None
        right, wrong = outputs[-1].prediction_tokens
        assert right >= (2 if 5 in prediction else len(alone.token_ids) // 2)
        assert wrong == 0


def test_logprobs_are_those_without_drafts(uniproc: Engine) -> None:
    asked = params(PERSON, logprobs=4, temperature=0.7)
    alone = uniproc.generate(PROMPTS, asked)
    Told.tell(told(alone), 3)
    for one, other in zip(uniproc.generate(PROMPTS, asked), alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert (entry.token, entry.rank, len(entry.top)) == (wanted.token, wanted.rank, len(wanted.top))
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 7},
        {"min_tokens": 9, "max_tokens": 12},
        {"stop": ["aa"]},
        {"stop_token_ids": [ord("b")]},
        {"stop_token_ids": [ord("b")], "min_tokens": 6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 2.0, "logit_bias": {ord("a"): 3.0, ord("q"): 100.0}},
    ],
    ids=", ".join,
)
def test_ends_and_edits_are_those_without_drafts(uniproc: Engine, proposals: None, changes: dict[str, Any]) -> None:
    before = accepted(uniproc)
    for temperature in (0.0, 1.0):
        for pattern in ("[abc]{4,20}", "a*(b|c)?"):
            check_same(uniproc, params(Grammar.regex(pattern), **{"temperature": temperature, **changes}))
    assert accepted(uniproc) > before


def test_choices_of_one_prompt_with_drafts_that_fit_one_of_them(uniproc: Engine) -> None:
    alone = uniproc.generate([PROMPTS[0]], params(PERSON), n=4)
    for one in alone:
        Told.tell({PROMPTS[0]: one.token_ids})
        for found, wanted in zip(uniproc.generate([PROMPTS[0]], params(PERSON), n=4), alone, strict=True):
            assert essence(found) == essence(wanted)


def test_free_requests_and_constrained_ones_have_drafts_in_one_step(uniproc: Engine) -> None:
    asked = [params(PERSON), params(None, max_tokens=40, temperature=0.0), params(PARENS, frequency_penalty=0.5)]
    alone = uniproc.generate(PROMPTS, asked)
    for wrong_every in QUALITIES:
        Told.tell(told(alone), wrong_every)
        assert list(map(essence, uniproc.generate(PROMPTS, asked))) == list(map(essence, alone))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler__overlap": "off"},
        {"scheduler__max_batch_tokens": 7},
        {"scheduler": "multi_step", "scheduler__options": {"steps": 4}},
        {"cache__block_size": 4, "speculator__max_drafts": 9},
        {"grammar": "xgrammar"},
        {"speculator": "draft_model"},
    ],
    ids=["no overlap", "chunks", "multi-step", "small blocks", "xgrammar", "draft model"],
)
def test_settings_change_no_token(engine_checkpoint: Path, uniproc: Engine, settings: dict[str, Any]) -> None:
    if "grammar" in settings:
        pytest.importorskip("xgrammar")
    if "speculator" in settings:
        settings = {**settings, "speculator__model": str(engine_checkpoint)}
    asked = [params(PERSON), params(Grammar.regex("[ab]{9,30}"), temperature=0.0), params(PERSON, temperature=0.4)]
    with make_engine(engine_checkpoint, **{**TOLD, **settings}) as engine:
        alone = (engine if "grammar" in settings else uniproc).generate(PROMPTS, asked)
        for wrong_every in QUALITIES:
            Told.tell(told(alone), wrong_every)
            assert list(map(essence, engine.generate(PROMPTS, asked))) == list(map(essence, alone))
        assert accepted(engine) > 0


def test_an_abort_amid_drafts_leaves_nothing_behind(uniproc: Engine) -> None:
    asked = params(PERSON, temperature=0.0)
    [alone] = uniproc.generate(PROMPTS[:1], asked)
    Told.tell({PROMPTS[0]: alone.token_ids})
    uniproc.add(Request(id="one", prompt=PROMPTS[0], params=asked))
    before = accepted(uniproc)
    while accepted(uniproc) == before:
        uniproc.step()
    output = uniproc.abort("one")
    assert output is not None
    assert output.finish_reason == "abort"
    while uniproc.has_work:
        uniproc.step()
    assert uniproc.stats().blocks_used == 0
    [again] = uniproc.generate(PROMPTS[:1], asked)
    assert essence(again) == essence(alone)


def test_preemption_changes_no_token(engine_checkpoint: Path, uniproc: Engine) -> None:
    prompts = [(*range(40 + number, 70 + number), *PROMPTS[0]) for number in range(9)]
    asked = params(PERSON, max_tokens=120)
    alone = uniproc.generate(prompts, asked)
    Told.tell(told(alone, prompts), 5)
    with make_engine(engine_checkpoint, cache__memory="96KiB", model__max_len=192, **TOLD) as engine:
        assert list(map(essence, engine.generate(prompts, asked))) == list(map(essence, alone))
        assert engine.stats().preemptions > 0
        assert accepted(engine) > 0


def test_drawn_tokens_are_distributed_as_the_grammar_allows_and_the_model_wants(uniproc: Engine) -> None:
    asked = [params(Grammar.regex("[ab][cd][ef]"), seed=seed, logprobs=0) for seed in range(900)]
    prompts = [PROMPTS[0]] * len(asked)
    Told.tell({PROMPTS[0]: uniproc.generate(PROMPTS[:1], asked[:1])[0].token_ids})
    before = accepted(uniproc)
    found = uniproc.generate(prompts, asked)
    assert accepted(uniproc) - before > 120
    chances: dict[tuple[int, ...], float] = {}
    for done in found:
        assert done.logprobs is not None
        chances[done.token_ids] = math.exp(sum(entry.logprob for entry in done.logprobs))
    outputs = sorted(chances)
    probs = np.array([chances[output] for output in outputs])
    assert 0.98 < probs.sum() < 1.0001
    counts = np.array([outputs.index(done.token_ids) for done in found])
    statistic, limit = chi_square(counts, np.append(probs, max(0.0, 1 - probs.sum())))
    assert statistic < limit
