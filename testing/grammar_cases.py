"""Grammars, texts and schemas for the conformance suite of grammar backends, and a vocabulary of bytes and more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from engine.core.grammars import Grammar, GrammarVocabulary

PIECES = (b"tr", b"true", b"ab", b'":', b'","', b"[]", b"12", "é".encode(), b"\xc3", b" ", b"{}")
"""Tokens of several bytes, next to one for each byte: some have the same bytes as others."""
EOS, OTHER_EOS, SPECIAL, EMPTY = range(256, 260)
NAMES = (b"<|end|>", b"<|stop|>", b"<|special|>", b"")
TOKENS = (*(bytes([byte]) for byte in range(256)), *NAMES, *PIECES, b"")
WORDS = -(-len(TOKENS) // 32)


def vocabulary() -> GrammarVocabulary:
    """A token per byte, a few of several bytes, special ones and ids without text."""
    return GrammarVocabulary(
        tokens=TOKENS,
        special_tokens=frozenset({EOS, OTHER_EOS, SPECIAL}),
        eos_tokens=frozenset({EOS, OTHER_EOS}),
        encode=lambda text: list(text.encode()),
    )


@frozen
class Case:
    """A grammar, texts that match it and texts that do not, and whether a text matches."""

    grammar: Grammar
    good: Sequence[str]
    bad: Sequence[str]
    matches: Callable[[str], bool]


def _json(check: Callable[[Any], bool]) -> Callable[[str], bool]:
    def matches_json(text: str) -> bool:
        try:
            return check(json.loads(text))
        except ValueError:
            return False

    return matches_json


def _is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and isinstance(value["tags"], list)
        and len(value["tags"]) <= 2
        and all(tag in (1, "x") and tag is not True for tag in value["tags"])
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CASES = (
    Case(
        Grammar.json_schema(PERSON),
        ['{"name":"true","tags":[1,"x"]}', '{"name":"é","tags":[]}'],
        ['{"name":"too long","tags":[]}', '{"name":"a"}', '{"name":"a","tags":[2]}', '{"name":"a","tags":[]}}', "[]"],
        _json(_is_person),
    ),
    Case(
        Grammar.json_schema({"type": "boolean"}), ["true", "false"], ["tru", "null", "1"], _json(bool.__instancecheck__)
    ),
    Case(
        Grammar.json_object(),
        ["{}", '{"a":[true,null,{"b":1.5}]}'],
        ["[]", '{"a"}', '{"a":1', "true"],
        _json(lambda value: isinstance(value, dict)),
    ),
    Case(
        Grammar.regex("(ab|c)*[0-9]{1,3}"),
        ["ababc12", "7", "123"],
        ["ab", "1234", "12a", ""],
        lambda text: re.fullmatch("(ab|c)*[0-9]{1,3}", text) is not None,
    ),
    Case(
        Grammar.choice(["a", "ab", "true", "é.*"]),
        ["a", "ab", "true", "é.*"],
        ["b", "aba", "tr", "éa", ""],
        lambda text: text in ("a", "ab", "true", "é.*"),
    ),
    Case(
        Grammar.lark('start: "(" start ")" | "x"'),
        ["x", "((x))"],
        ["(x", "x)", "()"],
        lambda text: re.fullmatch(r"(\(*)x(\)*)", text) is not None and text.count("(") == text.count(")"),
    ),
)
KEYWORDS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"type": "integer", "not": {"const": 3}}, "not", "3"),
    ({"type": "integer", "minimum": 3}, "minimum", "2"),
    ({"type": "integer", "exclusiveMaximum": 3}, "exclusiveMaximum", "3"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf", "4"),
    ({"type": "integer", "divisibleBy": 3}, "divisibleBy", "4"),
    ({"type": "integer", "disallow": "integer"}, "disallow", "4"),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"const": 4}}, "if", "3"),
    ({"type": "string", "minLength": 2}, "minLength", '"a"'),
    ({"type": "string", "pattern": "^b"}, "pattern", '"a"'),
    ({"type": "string", "pattern": "^(?!a)"}, "pattern", '"a"'),
    ({"type": "string", "pattern": "^a", "maxLength": 1}, "maxLength", '"ab"'),
    ({"type": "string", "format": "date"}, "format", '"a"'),
    ({"type": "string", "format": "no-such-format"}, "format", '"a"'),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1,1]"),
    ({"type": "array", "contains": {"const": 1}}, "contains", "[]"),
    ({"type": "array", "minItems": 1}, "minItems", "[]"),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, "prefixItems", "[2]"),
    ({"type": "object", "minProperties": 1}, "minProperties", "{}"),
    ({"type": "object", "maxProperties": 0}, "maxProperties", '{"a":1}'),
    ({"type": "object", "required": ["a"]}, "required", "{}"),
    ({"type": "object", "propertyNames": {"maxLength": 0}}, "propertyNames", '{"a":1}'),
    ({"type": "object", "patternProperties": {"^a": {"const": 2}}}, "patternProperties", '{"a":1}'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a":1}'),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", '{"a":1}'),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies", '{"a":1}'),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", '{"a":1}'),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems", "[1]"),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "oneOf", "3"),
    ({"allOf": [{"type": "integer"}, {"maximum": 2}]}, "allOf", "3"),
    ({"type": "object", "properties": {"a": {"not": {}}}, "x-guidance": {"lenient": True}}, "not", '{"a":1}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "maxLength": 1}, "maxLength", '"ab"'),
)
"""(schema, keyword, JSON that violates the keyword). A backend enforces the keyword, or names it in a refusal."""
WRONG = (
    Grammar("json_schema", '{"type": "strin"}'),
    Grammar("json_schema", "[1]"),
    Grammar("json_schema", "false"),
    Grammar("regex", "(a"),
    Grammar("regex", r"(a)\1"),
    Grammar("lark", "start: missing"),
    Grammar("lark", "begin: /a/"),
)
"""Grammars that no backend can compile."""
