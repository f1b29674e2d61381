"""Grammars as plain data, and how long and how deep they may be."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import Grammar
from engine.core.grammars.limits import check_limits, depth, schema_of


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    assert Grammar.json_schema({"b": 1, "a": 2}) == Grammar("json_schema", '{"b": 1, "a": 2}')
    assert Grammar.json_schema('{"b":1}').source == '{"b":1}'
    assert Grammar.json_schema(True).source == "true"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema({"a": object()}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "cannot be written as JSON"),
        (lambda: Grammar.choice([]), "at least one text"),
        (lambda: Grammar.choice(["a", ""]), "none may be empty"),
        (lambda: Grammar.choice("ab"), "must be a list of texts"),
        (lambda: Grammar.choice([1]), "must be a list of texts"),  # type: ignore[list-item]
        (lambda: Grammar.regex(1), "must be a text, not 1"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("\ud800"), "not Unicode"),
        (lambda: Grammar(None), "must be a text, not None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        make()
    assert caught.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("grammar", "levels"),
    [
        (Grammar.json_schema({"a": [{"b": "((("}]}), 3),
        (Grammar.json_schema({"a": '"(['}), 1),
        (Grammar.regex(r"((a)|\(\(\(|[((])"), 2),
        (Grammar.regex("[" * 60000), 0),
        (Grammar.lark('start: ("((" | (/[(]/ "a"))'), 2),
        (Grammar.choice(["((((", "[[[["]), 1),
        (Grammar.lark('"' * 60001), 0),
    ],
)
def test_depth_counts_the_brackets_that_nest(grammar: Grammar, levels: int) -> None:
    assert depth(grammar) == levels


def test_check_limits_refuses_long_and_deep_grammars() -> None:
    grammar = Grammar.regex("((a))")
    check_limits(grammar, max_chars=5, max_depth=2)
    with pytest.raises(InvalidRequestError, match=r"has 5 characters; at most 4 \(grammar.max_chars\)"):
        check_limits(grammar, max_chars=4, max_depth=2)
    with pytest.raises(InvalidRequestError, match=r"nested more than 1 deep \(grammar.max_depth\)"):
        check_limits(grammar, max_chars=5, max_depth=1)


def test_schema_of_refuses_schemas_that_nothing_matches() -> None:
    assert schema_of(Grammar.json_schema(True)) == {}
    with pytest.raises(InvalidRequestError, match="which no JSON matches"):
        schema_of(Grammar.json_schema(False))
    with pytest.raises(InvalidRequestError, match="must be an object"):
        schema_of(Grammar.json_schema("[]"))
