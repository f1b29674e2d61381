"""Structural tags as XGrammar reads them, with special tokens by number and every free text with its ends."""

from __future__ import annotations

import json
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammars import (
    Dispatch,
    Either,
    Format,
    FreeText,
    Grammar,
    Part,
    Repeat,
    Sequence,
    Text,
    Token,
    schema_of,
)
from engine.plugins.grammars.xgrammar_schemas import check_pattern, closed_schema

_MARK = "\ufdd0"
"""A character that no text contains (a noncharacter of Unicode); left out of all free text."""
NO_TEXT = b"\xff" + _MARK.encode()
"""What the library takes for the text of each special token. It never allows a token without any text, even where a
grammar names the token. The first byte is in no text that matches a grammar, but free text may be any bytes; so free
text leaves out the mark."""


def xgrammar_format(made: Format, max_whitespace: int) -> dict[str, Any]:
    """A format in XGrammar's language. Raises InvalidRequestError for what it would not enforce."""

    def convert(one: Format) -> dict[str, Any]:
        return xgrammar_format(one, max_whitespace)

    match made:
        case Text(value):
            return {"type": "const_string", "value": value}
        case Token(token):
            return {"type": "token", "token": token}
        case Part(grammar):
            return _part(grammar, max_whitespace)
        case FreeText(excludes):
            return {"type": "any_text", "excludes": [*excludes, _MARK]}
        case Sequence(elements):
            inside = [convert(one) for one in elements]
            return {"type": "sequence", "elements": inside or [{"type": "const_string", "value": ""}]}
        case Either(elements):
            return {"type": "or", "elements": [convert(one) for one in elements]}
        case Repeat(content, low, high):
            return {"type": "repeat", "min": low, "max": -1 if high is None else high, "content": convert(content)}
        case Dispatch(rules, loop, excludes):
            if not all(isinstance(start, Text) for start, _ in rules):
                return convert(made.expanded())
            texts = [[start.value, convert(rest)] for start, rest in rules if isinstance(start, Text)]
            return {"type": "dispatch", "rules": texts, "loop": loop, "excludes": [*excludes, _MARK]}


def _part(grammar: Grammar, max_whitespace: int) -> dict[str, Any]:
    if grammar.kind == "regex":
        check_pattern(grammar.source)
        return {"type": "regex", "pattern": grammar.source}
    if grammar.kind == "lark":
        raise InvalidRequestError("xgrammar does not enforce lark, as a format in a structural tag", "grammar")
    # The library's own format of schemas closes arrays and has no compact form; its grammar of a schema is exact.
    import xgrammar

    made = xgrammar.Grammar.from_json_schema(json.dumps(closed_schema(schema_of(grammar))), **json_form(max_whitespace))
    return {"type": "grammar", "grammar": str(made)}


def json_form(max_whitespace: int) -> dict[str, Any]:
    """The library's options for JSON with at most `max_whitespace` spaces in one place."""
    return {
        "any_whitespace": max_whitespace > 0,
        "max_whitespace_cnt": max_whitespace or None,
        "separators": None if max_whitespace else (",", ":"),
        "strict_mode": False,
    }
