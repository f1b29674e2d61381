"""Limits the length and the nesting of a grammar before a library reads it."""

from __future__ import annotations

import json
import re

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import JSON_SCHEMA, LARK, PARAMETER, REGEX, STRUCTURAL_TAG, Grammar
from engine.core.grammars.structural_tag_forms import part_grammars

_QUOTED = r'"(?:\\.|[^"\\])*(?:"|\Z)'
_PATTERN = r"/(?:\\.|[^/\\\n])+/"
_CHARACTERS = r"\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)"
_FLAT = {JSON_SCHEMA: _QUOTED, REGEX: _CHARACTERS, LARK: f"{_QUOTED}|{_PATTERN}"}
"""Kind of grammar -> pattern of the texts whose brackets do not nest."""


def check_length(grammar: Grammar, max_chars: int) -> None:
    """Raise InvalidRequestError for a grammar that is too long."""
    if len(grammar.source) > max_chars:
        raise InvalidRequestError(
            f"the grammar has {len(grammar.source)} characters; at most {max_chars} (grammar.max_chars) are allowed",
            PARAMETER,
        )


def check_limits(grammar: Grammar, *, max_chars: int, max_depth: int) -> None:
    """Raise InvalidRequestError for a grammar that is too long or too deep. The time is linear in its length."""
    check_length(grammar, max_chars)
    if depth(grammar) > max_depth:
        what = "the JSON schema" if grammar.kind == JSON_SCHEMA else "the grammar"
        raise InvalidRequestError(
            f"{what} is nested more than {max_depth} deep (grammar.max_depth); use fewer levels, or $ref and rules",
            PARAMETER,
        )
    if grammar.kind == STRUCTURAL_TAG:
        for part in part_grammars(grammar.source):
            check_limits(part, max_chars=max_chars, max_depth=max_depth)


def depth(grammar: Grammar) -> int:
    """How deep brackets nest in a grammar."""
    flat = _FLAT.get(grammar.kind, _QUOTED)
    deepest = level = 0
    for match in re.finditer(rf"\\.|{flat}|[(\[{{]|[)\]}}]", grammar.source, re.DOTALL):
        mark = match[0]
        if len(mark) == 1:
            level += 1 if mark in "([{" else -1
            deepest = max(deepest, level)
    return deepest


def schema_of(grammar: Grammar) -> dict[str, object]:
    """The JSON schema of a grammar as an object. Raises InvalidRequestError for JSON that is no schema, and `false`."""
    schema = json.loads(grammar.source)
    if schema is True:
        return {}
    if schema is False:
        raise InvalidRequestError("the JSON schema is false, which no JSON matches", PARAMETER)
    if not isinstance(schema, dict):
        raise InvalidRequestError("a JSON schema must be an object", PARAMETER)
    return schema
