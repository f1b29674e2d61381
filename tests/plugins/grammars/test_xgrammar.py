"""The xgrammar backend conforms, and refuses what XGrammar would ignore."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar import XGrammar
from engine.testing.grammar_cases import EMPTY, SPECIAL, TOKENS, vocabulary
from engine.testing.grammars import GrammarConformance, matches

pytest.importorskip("xgrammar")


class TestXGrammar(GrammarConformance):
    backend = XGrammar


def backend(max_whitespace: int = 16) -> XGrammar:
    return XGrammar(vocabulary(), JsonOptions(max_whitespace=max_whitespace))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"type": "object"}], "required": ["a"]}, "required next to anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "not"),
        ({"enum": [1, "a"], "type": "string"}, "type next to enum"),
        ({"type": ["string", "null"], "maxLength": 1}, "type as a list"),
        ({"minLength": 1}, "minLength"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "additionalProperties"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required with 'b'"),
        ({"type": "array", "items": [{"type": "null"}]}, "items as a list"),
        ({"type": "string", "pattern": "^a$b"}, r"\^ or \$ inside the pattern '\^a\$b'"),
        ({"type": "string", "pattern": "a"}, "pattern unless it has the form"),
        ({"type": "number", "minimum": 0.5}, "minimum for the type number"),
        ({"type": "string", "maxLength": "1"}, "maxLength unless it is a whole number"),
        ({"type": "string", "maxLength": 1, "minLength": 2}, "maxLength below minLength"),
        *(
            ({"type": "string", "pattern": pattern}, "pattern that may match quotes")
            for pattern in ("^.$", "^[^a]$", '^"$', r"^\\$", r"^\s$", r"^\W$", "^[!-z]$", "^[A-z]$")
        ),
    ],
)
def test_what_xgrammar_would_ignore_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"xgrammar does not enforce {keyword}"):
        backend().compile(Grammar.json_schema(schema))


@pytest.mark.parametrize("pattern", ["a$b", "a^b", "(?i)a", "(?=a)b"])
def test_parts_of_expressions_that_xgrammar_ignores_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="xgrammar does not enforce"):
        backend().compile(Grammar.regex(pattern))


def test_patterns_and_lengths_of_strings_are_enforced() -> None:
    parts = [{"type": "string", "pattern": r"^[a-c]\.\d{2}$"}, {"type": "string", "maxLength": 2}]
    compiled = backend(0).compile(Grammar.json_schema({"type": "array", "prefixItems": parts}))
    assert matches(compiled, '["b.12","é"]')
    assert not any(matches(compiled, text) for text in ('["b112","a"]', '["b.12","abc"]', '["b.12","\n"]'))


def test_a_property_cannot_come_twice() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    compiled = backend().compile(Grammar.json_schema(schema))
    assert matches(compiled, '{"a":1}')
    assert not matches(compiled, '{"a":1,"a":"x"}')


@pytest.mark.parametrize(("most", "spaces", "allowed"), [(0, 0, True), (0, 1, False), (3, 3, True), (3, 4, False)])
def test_whitespace_between_the_parts_of_json_is_bounded(most: int, spaces: int, allowed: bool) -> None:
    compiled = backend(most).compile(Grammar.json_object())
    assert matches(compiled, '{"a":' + " " * spaces + "1}") is allowed


def test_choices_of_any_characters() -> None:
    texts = ["a\n\x7f", "a|b", "(é", '"\\']
    compiled = backend().compile(Grammar.choice(texts))
    assert all(matches(compiled, text) for text in texts)
    assert not matches(compiled, "a")


def test_refused_drafts_leave_no_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    matcher = backend().compile(Grammar.regex("ab")).matcher()
    for token in (EMPTY, SPECIAL, len(TOKENS) - 1, ord("b")):
        assert not matcher.accept(token)
        assert matcher.count_allowed([ord("a"), token, ord("b")]) == 1 + (token == ord("b"))
    assert capfd.readouterr() == ("", "")


def test_nothing_is_forced_amid_a_character() -> None:
    matcher = backend().compile(Grammar.choice(["é", "ê"])).matcher()
    for token in "é".encode():
        assert not matcher.forced_tokens()
        assert matcher.accept(token)
