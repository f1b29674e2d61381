"""The llguidance backend conforms, and refuses what it would not enforce."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar, GrammarMatcher
from engine.plugins.grammars import llguidance
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.options import JsonOptions
from engine.testing.grammar_cases import WORDS, vocabulary
from engine.testing.grammars import GrammarConformance, matches
from engine.testing.structural_tag_cases import CALL, call, tags


class TestLLGuidance(GrammarConformance):
    backend = LLGuidance


MANY = {"anyOf": [{"properties": {name: {"type": "string"}}} for name in "abcdefgh"]}


def backend(max_whitespace: int = 16) -> LLGuidance:
    return LLGuidance(vocabulary(), JsonOptions(max_whitespace=max_whitespace))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"properties": {"a": {"extends": {}}}}), "extends, of draft 3"),
        (Grammar.json_schema({"$ref": "#"}), "no text matches it"),
        (Grammar.json_schema({"$ref": "http://elsewhere/schema"}), "http://elsewhere/schema"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (Grammar.regex("a$b"), "lookarounds not supported"),
        (Grammar.regex(r"[^\x00-\U0010ffff]"), "no text matches it"),
        (Grammar.lark('start[temperature=0.5]: "a"'), "temperature"),
        (Grammar.lark('start: <|end|> "a"'), "no text matches it"),
        (Grammar.lark("start: <|other|>"), "unknown special token"),
        (Grammar.json_schema({"allOf": [MANY] * 5}), "schema too large"),
    ],
)
def test_compile_refuses_what_would_not_be_enforced(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        backend().compile(grammar)
    assert caught.value.parameter == "grammar"


def properties(count: int) -> Grammar:
    """An object with optional properties, any of which may come next."""
    names = {f"p{number}": {"type": "string"} for number in range(count)}
    return Grammar.json_schema({"type": "object", "properties": names, "additionalProperties": False})


def follow(matcher: GrammarMatcher, text: bytes) -> None:
    """Make the mask before each byte, and accept the byte."""
    for byte in text:
        matcher.fill_mask(np.zeros(WORDS, np.int32))
        matcher.accept(byte)


def test_a_grammar_of_many_ways_ends_instead_of_taking_long() -> None:
    matcher = backend().compile(properties(900)).matcher()
    with pytest.raises(InvalidRequestError, match=r"it is too complex: .*(items|expressions)"):
        follow(matcher, b'{"p1":')


def test_a_hundred_optional_properties_and_tools_are_not_too_many() -> None:
    assert matches(backend().compile(properties(100)), '{"p1":"x","p99":""}')
    calls = [call(f"tool{number}") for number in range(100)]
    tools = Grammar.structural_tag(tags("triggered_tags", calls, triggers=["<tool_call>"]))
    assert matches(backend().compile(tools), CALL.replace('"f"', '"tool99"'))


def test_a_property_may_have_the_name_of_an_old_keyword() -> None:
    schema = {"type": "object", "properties": {"extends": {"const": 1}}, "required": ["extends"]}
    assert matches(backend().compile(Grammar.json_schema(schema)), '{"extends":1}')


@pytest.mark.parametrize(("most", "spaces", "allowed"), [(0, 0, True), (0, 1, False), (3, 3, True), (3, 4, False)])
def test_whitespace_between_the_parts_of_json_is_bounded(most: int, spaces: int, allowed: bool) -> None:
    compiled = backend(most).compile(Grammar.json_object())
    assert matches(compiled, '{"a":' + " " * spaces + "1}") is allowed


def test_a_special_token_of_a_lark_grammar_is_the_token_not_its_name() -> None:
    matcher = backend().compile(Grammar.lark('start: <|special|> "a"')).matcher()
    assert not matcher.accept(ord("<"))
    assert [matcher.accept(token) for token in (258, ord("a"), 256)] == [True] * 3


def test_choices_of_any_characters() -> None:
    texts = ["a\0\n\x7f", "a|b", "(é", '"\\']
    compiled = backend().compile(Grammar.choice(texts))
    assert all(matches(compiled, text) for text in texts)
    assert not matches(compiled, "a")


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_whitespace is -1; give a number from 0 to 1000"):
        JsonOptions(max_whitespace=-1)


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the masks of any batch with several threads."""
    monkeypatch.setattr(llguidance, "MIN_PARALLEL", 2)
    monkeypatch.setattr(llguidance, "MIN_CORES", 1)


@pytest.mark.usefixtures("parallel")
def test_masks_that_several_threads_make_are_the_same() -> None:
    TestLLGuidance().test_batches()


@pytest.mark.usefixtures("parallel")
def test_matchers_of_all_originals_make_the_same_masks() -> None:
    compiled = backend().compile(Grammar.json_schema({"type": "array", "items": {"type": "string"}}))
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join()
    assert isinstance(compiled, llguidance._Compiled)
    assert len(compiled._originals) == llguidance._extra_originals(0.0, llguidance._cores()) + 1
    matchers = [compiled.matcher() for _ in range(20)]
    for matcher in matchers:
        follow(matcher, b'["a')
    masks = np.zeros((20, WORDS), np.int32)
    assert not any(type(matchers[0]).fill_batch(matchers, masks))
    assert masks[0].any()
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


def test_only_as_many_originals_are_made_as_cores_can_use_and_compile_soon() -> None:
    found = [
        llguidance._extra_originals(*case) for case in [(0.001, 16), (0.001, 4), (0.001, 2), (0.02, 16), (1.0, 16)]
    ]
    assert found == [7, 3, 0, 2, 0]


@pytest.mark.usefixtures("parallel")
def test_a_matcher_that_fails_in_a_batch_leaves_the_others_their_masks() -> None:
    many, one = backend().compile(properties(900)), backend().compile(Grammar.choice(["a"]))
    matchers = [one.matcher() for _ in range(9)]
    failing = many.matcher()
    with suppress(InvalidRequestError):
        follow(failing, b'{"p1":')
    masks = np.zeros((10, WORDS), np.int32)
    problems = type(failing).fill_batch([*matchers, failing], masks)
    assert [problem is None for problem in problems] == [True] * 9 + [False]
    assert all(np.array_equal(mask, masks[0]) for mask in masks[:9])
    assert masks[0].any()
