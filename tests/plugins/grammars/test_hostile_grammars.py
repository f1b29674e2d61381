"""Grammars that explode are refused with a sentence, or stay small."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar, GrammarBackend
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar import XGrammar
from engine.testing.grammar_cases import vocabulary
from engine.testing.grammars import allowed

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module", params=[LLGuidance, XGrammar])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param(vocabulary(), JsonOptions())


def chain(count: int, one: Any) -> Grammar:
    """Definitions each of which refers to the next."""
    definitions = {f"d{number}": one({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
    return Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}})


def arrays(*counts: int) -> Grammar:
    schema: dict[str, Any] = {"type": "string"}
    for count in counts:
        schema = {"type": "array", "items": schema, "minItems": count, "maxItems": count}
    return Grammar.json_schema(schema)


@pytest.mark.parametrize(
    "grammar",
    [
        chain(20, lambda ref: {"anyOf": [ref, ref]}),
        chain(20, lambda ref: {"type": "array", "prefixItems": [ref, ref], "minItems": 2, "items": False}),
        chain(1, lambda _: {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}),
        Grammar.json_schema({"enum": [f"{number:05}" for number in range(5000)]}),
        Grammar.json_schema({"type": "string", "maxLength": 10**9}),
        Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
        arrays(10**9),
        arrays(1000, 1000, 1000),
        Grammar.regex("((a{1,100}){1,100}){1,100}"),
        Grammar.regex("(((a+)+)+)+b"),
        Grammar.regex("a?" * 300 + "a" * 300),
        Grammar.regex("(.*a){20}"),
        Grammar.regex("[a-z]{1000000}"),
        Grammar.lark('start: a\na: a a | "x" | a "y" a'),
        Grammar.lark('start: (a* b*)*\na: "x"?\nb: "y"?'),
        Grammar.lark('start: (("a"{1,100}){1,100}){1,100}'),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.source[:40]}",
)
def test_an_exploding_grammar_is_bounded(backend: GrammarBackend[Any], grammar: Grammar) -> None:
    if grammar.kind not in backend.kinds:
        pytest.skip("the backend does not know this kind")
    with suppress(InvalidRequestError):
        matcher = backend.compile(grammar).matcher()
        for _ in range(20):
            mask = allowed(matcher)
            if matcher.is_terminated:
                return
            assert matcher.accept(int(mask.argmax()))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "string", "maxLength": 5000}), "maxLength 5000; at most 4096"),
        (arrays(5000), "maxItems 5000; at most 4096"),
        (arrays(300, 300), "that nest to more than 65536"),
        (Grammar.regex("[a-z]{5000}"), "at most 4096 times"),
        (Grammar.regex("(a{1,100}){1,100}"), "is too complex: written out it has 10000 characters"),
        (Grammar.regex("a?" * 129), "129 quantifiers; at most 4096 and 128"),
    ],
)
def test_xgrammar_is_given_no_grammar_that_takes_long(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"xgrammar does not take .*{reason}"):
        XGrammar(vocabulary(), JsonOptions()).compile(grammar)


def test_llguidance_is_given_no_large_divisor() -> None:
    with pytest.raises(InvalidRequestError, match=r"multipleOf 0\.99983; at most 10000"):
        LLGuidance(vocabulary(), JsonOptions()).compile(Grammar.json_schema({"type": "number", "multipleOf": 0.99983}))
