"""Every output that ends with an end-of-sequence token matches its grammar, in any batch and over every executor."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from engine.core.engine import Engine
from engine.core.errors import InvalidRequestError, PluginError
from engine.core.generation import Completion
from engine.core.grammars.grammar import Grammar
from engine.core.types import SamplingParams
from engine.plugins.grammars.llguidance import LLGuidance

PROMPTS: tuple[tuple[int, ...], ...] = ((5, 6, 7), (300, 301, 302, 5), (9,))
MAX_TOKENS = 160
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def make_engine(checkpoint: Path, **options: Any) -> Engine:
    common = {
        "cache__memory": "1MiB",
        "executor__device": "cpu",
        "model__dtype": "float32",
        "scheduler__overlap": "on",
        "grammar__options": {"max_whitespace": 1},
    }
    return Engine(str(checkpoint), **{**common, **options})


NGRAM = {"speculator": "ngram", "speculator__options": {"min_n": 1}, "speculator__length": "fixed"}


@pytest.fixture(scope="module", params=["uniproc", "multiproc", "ngram"])
def engine(request: pytest.FixtureRequest, engine_checkpoint: Path) -> Iterator[Engine]:
    options = NGRAM if request.param == "ngram" else {"executor": request.param}
    with make_engine(engine_checkpoint, **options) as made:
        yield made


@pytest.fixture(scope="module", params=["uniproc", "ngram"])
def uniproc(request: pytest.FixtureRequest, engine_checkpoint: Path) -> Iterator[Engine]:
    with make_engine(engine_checkpoint, **(NGRAM if request.param == "ngram" else {})) as made:
        yield made


def params(grammar: Grammar | None, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 3, "grammar": grammar, **changes})


def check(done: Completion, matches: Callable[[str], object]) -> None:
    """The output matches, or max_tokens cut it off."""
    assert done.error is None
    if done.finish_reason == "stop":
        assert matches(done.text), done.text
    else:
        assert done.finish_reason == "length"


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 1, None, "é"]},
        {"const": {"k": [1]}},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{1,2}$"},
        {"type": "string", "format": "date"},
    ]
)


PIECES = st.sampled_from(["a", "(b|cd)?", "[x-z]{2,3}", "(é|ß)*", "[0-9]", "[^a-c ]", "(ab|a)+", "."])
PATTERNS = st.lists(PIECES, min_size=1, max_size=4).map("".join)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties)[:required],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(_object, st.dictionaries(st.sampled_from(["a", "b", "a b"]), inner, max_size=2), st.integers(0, 2)),
    ),
    max_leaves=4,
)


@few
@given(schema=SCHEMAS)
def test_outputs_match_json_schemas(engine: Engine, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for temperature in (0.0, 1.0):
        constrained = params(Grammar.json_schema(schema), temperature=temperature)
        for done in engine.generate(PROMPTS[:2], [constrained, constrained], n=2):
            check(done, lambda text: not list(validator.iter_errors(json.loads(text))))


@few
@given(pattern=PATTERNS)
def test_outputs_match_regular_expressions(engine: Engine, pattern: str) -> None:
    for temperature in (0.0, 1.0):
        [done] = engine.generate(PROMPTS[:1], params(Grammar.regex(pattern), temperature=temperature))
        check(done, re.compile(pattern).fullmatch)


@few
@given(texts=st.lists(st.text('ab|"\\\n é🙂', min_size=1, max_size=8), min_size=1, max_size=5))
def test_outputs_are_one_of_the_choices(engine: Engine, texts: list[str]) -> None:
    for temperature in (0.0, 1.0):
        [done] = engine.generate(PROMPTS[:1], params(Grammar.choice(texts), temperature=temperature))
        assert done.finish_reason == "stop"
        assert done.text in texts


PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
)
PARENS = Grammar.lark('start: "(" start ")" start | ""')


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "old"} and isinstance(value["old"], bool) and len(value["name"]) <= 12


def test_free_rows_next_to_constrained_ones_are_as_without_them(engine: Engine) -> None:
    free = [params(None, temperature=temperature, max_tokens=24) for temperature in (0.0, 1.0)]
    alone = [engine.generate([PROMPTS[0]], one)[0].token_ids for one in free]
    mixed = engine.generate([PROMPTS[0]] * 4, [free[0], params(PERSON), free[1], params(PARENS, temperature=0.0)])
    assert [mixed[0].token_ids, mixed[2].token_ids] == alone
    check(mixed[1], is_person)


def test_a_seed_gives_the_same_output_in_any_batch_and_each_choice_another(engine: Engine) -> None:
    many = engine.generate([PROMPTS[0]], params(PERSON), n=4)
    assert [done.text for done in engine.generate([PROMPTS[0]], params(PERSON), n=4)] == [done.text for done in many]
    assert engine.generate([PROMPTS[0]], params(PERSON))[0].text == many[0].text
    assert len({done.text for done in many}) > 1
    for done in many:
        check(done, is_person)


def test_a_stream_has_the_text_of_the_whole_output(engine: Engine) -> None:
    whole = engine.generate([PROMPTS[1]], params(PERSON))[0]
    streamed = list(engine.stream(PROMPTS[1], params(PERSON)))
    assert "".join(delta.text for delta in streamed) == whole.text
    assert streamed[-1].finish_reason == whole.finish_reason == "stop"


def test_tokens_are_the_same_with_several_iterations_per_step(engine_checkpoint: Path, uniproc: Engine) -> None:
    constrained = [params(PERSON), params(None, max_tokens=30), params(PARENS)]
    expected = [done.token_ids for done in uniproc.generate(PROMPTS, constrained)]
    options = {"scheduler": "multi_step", "scheduler__options": {"steps": 5}}
    with make_engine(engine_checkpoint, **options) as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, constrained)] == expected


def test_preemption_and_prefix_hits_change_nothing(engine_checkpoint: Path, uniproc: Engine) -> None:
    prompts = [(*range(40, 70), *prompt) for prompt in PROMPTS for _ in range(3)]
    constrained = [params(PERSON, seed=seed) for seed in range(len(prompts))]
    expected = [done.token_ids for done in uniproc.generate(prompts, constrained)]
    with make_engine(engine_checkpoint, cache__memory="96KiB", model__max_len=192) as engine:
        short = [params(PERSON, seed=seed, max_tokens=120) for seed in range(len(prompts))]
        found = [done.token_ids for done in engine.generate(prompts, short)]
        assert engine.stats().preemptions > 0
        assert engine.stats().prefix_hits > 0
    assert [tokens[:120] for tokens in expected] == found


def test_logprobs_are_of_the_tokens_that_the_grammar_allows(uniproc: Engine) -> None:
    [done] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("(x|y)z"), logprobs=5, temperature=0.0))
    assert done.logprobs is not None
    first, second, end = done.logprobs
    assert len(first.top) == 2  # a token of "xz" would be a third
    assert sum(2.718281828459045**logprob for _, logprob in first.top) == pytest.approx(1, abs=1e-5)
    assert (second.logprob, second.rank, len(second.top)) == (pytest.approx(0, abs=1e-5), 1, 1)
    assert (end.token, len(end.top)) == (uniproc.tokenizer.eos_token_id, 1)


def test_min_tokens_bans_the_end_as_long_as_anything_else_may_come(uniproc: Engine) -> None:
    [longer] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("a*"), min_tokens=7, max_tokens=9))
    assert len(longer.token_ids) >= 7
    assert set(longer.text) == {"a"}
    [done] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("ab"), min_tokens=20))
    assert (done.text, done.finish_reason) == ("ab", "stop")


def test_stop_ends_an_output_amid_its_grammar(uniproc: Engine) -> None:
    [done] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("abcabc"), stop=["ca"]))
    assert (done.text, done.finish_reason) == ("ab", "stop")
    [token] = uniproc.tokenizer.encode("z")
    [done] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("xzx"), stop_token_ids=[token]))
    assert (done.text, done.finish_reason) == ("x", "stop")


def test_penalties_and_biases_let_no_other_token_through(uniproc: Engine) -> None:
    edits = {"logit_bias": {ord("q"): 100.0}, "presence_penalty": 2.0, "repetition_penalty": 5.0, "temperature": 0.0}
    [done] = uniproc.generate([PROMPTS[0]], params(Grammar.regex("[ab]{12}"), **edits))
    assert re.fullmatch("[ab]{12}", done.text)


def test_a_grammar_that_is_refused_is_an_error_of_the_request(uniproc: Engine) -> None:
    with pytest.raises(InvalidRequestError, match='"uniqueItems"') as caught:
        uniproc.generate([PROMPTS[0]], params(Grammar.json_schema({"type": "array", "uniqueItems": True})))
    assert caught.value.parameter == "grammar"
    with pytest.raises(InvalidRequestError, match="ignore_eos would go on where the grammar has ended"):
        params(PERSON, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="grammar must be a Grammar"):
        params("a*")  # type: ignore[arg-type]
    assert uniproc.generate([PROMPTS[0]], params(PERSON))[0].finish_reason == "stop"


def test_a_backend_passed_in_from_python_is_refused_where_workers_would_not_have_it(engine_checkpoint: Path) -> None:
    mine = type("Mine", (LLGuidance,), {})
    with pytest.raises(PluginError, match="grammars 'Mine' was passed in as an object"):
        make_engine(engine_checkpoint, grammar=mine, grammar__options={}, executor="multiproc")


def test_outputs_match_with_another_backend(engine_checkpoint: Path) -> None:
    pytest.importorskip("xgrammar")
    with make_engine(engine_checkpoint, grammar="xgrammar") as engine:
        for temperature in (0.0, 1.0):
            for done in engine.generate(PROMPTS, params(PERSON, temperature=temperature), n=2):
                check(done, is_person)
            [done] = engine.generate(PROMPTS[:1], params(Grammar.choice(["one", "é"]), temperature=temperature))
            assert done.text in ("one", "é")
        with pytest.raises(InvalidRequestError, match=r"grammar 'xgrammar' .* knows no grammars of the kind 'lark'"):
            engine.generate(PROMPTS[:1], params(PARENS))


def test_concurrent_async_streams_match_their_grammars(uniproc: Engine) -> None:
    async def text(grammar: Grammar) -> str:
        return "".join([delta.text async for delta in uniproc.astream(PROMPTS[0], params(grammar))])

    async def both() -> list[str]:
        return await asyncio.gather(text(PERSON), text(Grammar.choice(["one", "two"])))

    person, choice = asyncio.run(both())
    assert is_person(person)
    assert choice in ("one", "two")


def test_async_streams_go_on_while_others_wait_for_their_grammar(
    uniproc: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go = threading.Event(), threading.Event()
    compile_now = uniproc._grammars._compile

    def hold(*given: Any) -> Any:
        begun.set()
        assert let_go.wait(60)
        return compile_now(*given)

    monkeypatch.setattr(uniproc._grammars, "_compile", hold)
    grammar = Grammar.choice(["held back"])

    async def text(constraint: Grammar | None) -> str:
        return "".join([delta.text async for delta in uniproc.astream(PROMPTS[0], params(constraint))])

    async def run() -> list[str]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = [asyncio.create_task(text(grammar)) for _ in range(2)]
        try:
            while not begun.is_set():
                await asyncio.sleep(0.01)
            await asyncio.wait_for(text(None), 30)
            assert not any(task.done() for task in waiting)
        finally:
            let_go.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == ["held back", "held back"]


def test_a_grammar_reaches_the_workers_while_it_is_compiled(uniproc: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Grammar, ...]] = []
    submit = uniproc._executor.submit
    monkeypatch.setattr(uniproc._executor, "submit", lambda step: sent.append(step.grammars) or submit(step))
    grammar = Grammar.choice(["sent ahead"])
    stream = uniproc.stream(PROMPTS[0], params(None, ignore_eos=True, max_tokens=8))
    next(stream)
    sent.clear()
    uniproc.compile_grammar(params(grammar))
    list(stream)
    assert sent[0] == (grammar,)
    assert not any(sent[1:])
