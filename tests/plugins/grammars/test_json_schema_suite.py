"""Schemas of the JSON-Schema test suite, and random ones: whatever a backend accepts is valid."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar, GrammarBackend
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.llguidance_schemas import ecma_pattern
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar import XGrammar
from engine.testing.grammar_cases import vocabulary
from engine.testing.grammars import matches, walk
from engine.testing.json_schema_suite import by_keyword, judge, read_suite

SUITE = Path(__file__).resolve().parents[3] / "benchmarks" / "json_schema_suite" / "schemas.json"
pytest.importorskip("xgrammar")
both = pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
some = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@cache
def backend(name: str) -> GrammarBackend[Any]:
    cls: Any = {"llguidance": LLGuidance, "xgrammar": XGrammar}[name]
    made: GrammarBackend[Any] = cls(vocabulary(), JsonOptions(max_whitespace=1))
    return made


@both
def test_no_backend_accepts_an_invalid_instance_of_the_suite(name: str) -> None:
    """Every third schema; benchmarks/json_schema_suite.py runs all."""
    verdicts = list(judge(backend(name), read_suite(SUITE)[::3]))
    wrong = [(verdict.schema.schema, verdict.wrong) for verdict in verdicts if verdict.wrong]
    assert not wrong, f"{name} accepts invalid instances: {wrong[0]}"
    assert "ignored" not in by_keyword(verdicts).values()
    assert sum(verdict.compiled is not None for verdict in verdicts) >= {"llguidance": 70, "xgrammar": 15}[name]


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"type": "string", "pattern": "^.$"}, '"\u2028"'),
        ({"type": "string", "pattern": r"^\s$"}, '"\x85"'),
        ({"type": "string", "pattern": r"^\S$"}, '"\ufeff"'),
        ({"type": "string", "pattern": r"^\D$"}, '"\u0966"'),
        ({"type": "string", "pattern": r"^[\D]$"}, '"5"'),
        ({"format": "date"}, '"2023-02-29"'),
        ({"format": "date"}, '"1900-02-29"'),
        ({"format": "time"}, '"22:59:60Z"'),
        ({"format": "date-time", "allOf": [{"pattern": "^2"}]}, '"2021-02-29T00:00:00Z"'),
        ({"format": "hostname"}, '"xn--x"'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_llguidance_does_not_accept_what_only_looks_right(schema: dict[str, Any], wrong: str) -> None:
    assert not matches(backend("llguidance").compile(Grammar.json_schema(schema)), wrong)


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"format": "date"}, '"2024-02-29"'),
        ({"format": "date"}, '"2000-02-29"'),
        ({"format": "date-time"}, '"2021-12-31T23:59:59.5+01:00"'),
        ({"format": "time"}, '"23:59:59Z"'),
        ({"format": "hostname"}, '"a-b.example.org"'),
        ({"type": "string", "pattern": r"^[\s\-\]x/]$"}, '"]"'),
        ({"type": "string", "pattern": r"^[^\x00-\x1f]$"}, '"a"'),
        ({"type": "object", "minProperties": 2, "required": ["a"], "properties": {"a": {}}}, '{"a":1,"b":2}'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_llguidance_accepts_what_is_right(schema: dict[str, Any], right: str) -> None:
    assert matches(backend("llguidance").compile(Grammar.json_schema(schema)), right)


@pytest.mark.parametrize(
    "keyword",
    [
        {"propertyNames": True},
        {"propertyNames": {}},
        {"propertyNames": {"type": "string", "description": "a name"}},
        {"propertyNames": {"type": ["string", "null"]}},
        {"uniqueItems": False},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
    ],
    ids=str,
)
@both
def test_a_keyword_is_accepted_when_it_restricts_nothing(name: str, keyword: dict[str, Any]) -> None:
    kind, text = ("array", '{"a":[]}') if next(iter(keyword)).endswith("Items") else ("object", '{"a":{}}')
    schema = {"type": "object", "properties": {"a": {"type": kind, **keyword}}}
    assert matches(backend(name).compile(Grammar.json_schema(schema)), text)


@pytest.mark.parametrize(
    "keyword",
    [
        {"propertyNames": False},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"type": "string", "minLength": 1}},
        {"uniqueItems": True},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False},
    ],
    ids=str,
)
@both
def test_a_keyword_is_refused_when_it_restricts_something(name: str, keyword: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(keyword))):
        backend(name).compile(Grammar.json_schema(keyword))


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
FLOAT32 = {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", **INT64}, ["-5", str(-(10**17)), str(2**63 - 1)], ["1.5", str(2**63), str(-(2**63) - 1)]),
        ({"type": "integer", "exclusiveMinimum": -(2**63)}, ["-5", str(10**17)], ["1.5"]),
        ({"type": ["integer", "null"], **INT64}, ["5", "null"], ["1.5", str(2**63)]),
        ({"type": "number", **INT64}, ["-5", "1.5"], [str(2**64)]),
        ({"type": "number", **FLOAT32}, ["-5", "1.5"], ["1e39"]),
        ({"type": "integer", "allOf": [{"maximum": 2**63 - 1}]}, [str(2**63 - 1)], [str(2**63)]),
    ],
    ids=str,
)
def test_llguidance_accepts_bounds_when_they_are_those_of_a_type(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    compiled = backend("llguidance").compile(Grammar.json_schema(schema))
    assert [text for text in right if not matches(compiled, text)] == []
    assert [text for text in wrong if matches(compiled, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minProperties": 2}, "minProperties of an object with additional properties"),
        ({"const": "a\0"}, "const with the control character"),
        ({"properties": {"a\x01": {}}}, "properties with the control character"),
        ({"pattern": "a\x01"}, "the pattern"),
        ({"pattern": r"a\v"}, "the pattern"),
        ({"pattern": r"[\x01]"}, "the pattern"),
        ({"pattern": "[a&&b]"}, "the pattern"),
        ({"pattern": "[[a]]"}, "the pattern"),
        ({"pattern": "(?i)a"}, "the pattern"),
        ({"pattern": r"\Aa"}, "the pattern"),
        ({"patternProperties": {r"[\S]": {}}}, "the pattern"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x"}}}, r"\$id inside of a schema with \$ref"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_llguidance_is_not_given_what_it_would_read_in_another_way(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"llguidance does not enforce {reason}"):
        backend("llguidance").compile(Grammar.json_schema(schema))


@pytest.mark.parametrize("ref", ["#a", "http://localhost/a", "#/properties/a", "#/$defs/b", "#/$defs/a~1b"])
def test_xgrammar_is_given_no_reference_that_it_would_ignore(ref: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": ref}}, "$defs": {"a": {}, "a~1b": {}}}
    with pytest.raises(InvalidRequestError, match=r"xgrammar does not enforce \$ref"):
        backend("xgrammar").compile(Grammar.json_schema(schema))


def test_ecma_pattern_keeps_what_means_the_same() -> None:
    pattern = r"^(?:[a-z]+|\d{2,3}|(?<n>x)|[^\]\-/]|\/|\u00e9|\.)*$"
    assert ecma_pattern(pattern) == pattern


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"enum": ["a", 1, None, "é"]},
        {"const": {"k": [1]}},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": r"^[a-c]{1,2}\d$"},
        {"$ref": "#/$defs/d"},
    ]
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)[:required]}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(_object, st.dictionaries(st.sampled_from(["a", "b", "a b"]), inner, max_size=2), st.integers(0, 2)),
    ),
    max_leaves=4,
)


@both
@some
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_random_walks_under_random_schemas_are_valid(name: str, schema: dict[str, Any], seed: int) -> None:
    schema = {**schema, "$defs": {"d": {"type": "null"}}}
    text, ended = walk(backend(name).compile(Grammar.json_schema(schema)).matcher(), random.Random(seed))
    if ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


PIECES = st.sampled_from(["a", "(b|cd)?", "[x-z]{2,3}", "(é|ß)*", "[0-9]", "[^a-c ]", "(ab|a)+"])


@both
@some
@given(pattern=st.lists(PIECES, min_size=1, max_size=4).map("".join), seed=st.integers(0, 99))
def test_random_walks_under_random_expressions_match(name: str, pattern: str, seed: int) -> None:
    text, ended = walk(backend(name).compile(Grammar.regex(pattern)).matcher(), random.Random(seed))
    assert not ended or re.fullmatch(pattern, text)


@both
@some
@given(texts=st.lists(st.text('ab|"\\\n é🙂', min_size=1, max_size=8), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_random_walks_under_random_choices_end_in_one(name: str, texts: list[str], seed: int) -> None:
    text, ended = walk(backend(name).compile(Grammar.choice(texts)).matcher(), random.Random(seed))
    assert ended
    assert text in texts
