"""JSON schemas for llguidance: what it would read in another way is written in its way, or refused by name.

Found with the JSON-Schema test suite (tests/plugins/grammars/test_json_schema_suite.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammars import (
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    restricts_nothing,
    schema_keywords,
)

OLD_KEYWORDS = frozenset({"disallow", "divisibleBy", "extends"})
"""Keywords of draft 3 of JSON Schema, which llguidance takes for comments."""
ESCAPES = 'nrbtf\\"'
"""Escapes in strings: all but \\u, by which an additional property could have the name of another one."""
MAX_MULTIPLE = 10_000
"""Maximum multipleOf, its digits read as a whole number: llguidance makes a state per remainder, 10 s for 999,983."""
MAX_BOUND = 9 * 10**17
"""Maximum size of a bound of numbers, and of the minimum of integers, for which llguidance can write an expression."""
LITERALS = frozenset({"const", "enum", "properties", "required"})
"""Keywords with texts of the output in them."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes with \\u."""
_CONTROL_PIECE = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:v|x[01]|x7f|u00[01]|u007f|u\{0*[01]?.\}|u\{0*7f\})", re.IGNORECASE
)
_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
FORMATS: Mapping[str, str] = {
    "date": f"^{_DAY}$",
    "date-time": f"^{_DAY}[Tt]{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "time": f"^{_TIME}$",
}
"""Formats of which llguidance lets wrong texts pass -> a pattern of right ones: days that exist, no leap seconds, no
labels in Punycode, and hosts of at most four labels."""
_SPACES = r"\t\n\x0b\x0c\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_OUTSIDE = {
    ".": r"[^\n\r\u{2028}\u{2029}]",
    r"\s": f"[{_SPACES}]",
    r"\S": f"[^{_SPACES}]",
    r"\D": r"\P{Nd}",
    r"\W": r"[^\p{L}\p{M}\p{N}_]",
}
"""Outside of classes, an escape or dot -> what ECMA 262 means by it, or less where Python's re, with which many clients
validate, means less."""
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[^}]*\}|[dDwWsStnrvfbB]|[^a-zA-Z0-9<>])"
_PIECE = re.compile(rf"(?P<escape>{_ESCAPE})|(?P<wrong>\\|\(\?(?![:=!<]))|(?P<class>\[\^?)|.", re.DOTALL)
_IN_CLASS = re.compile(rf"(?P<escape>{_ESCAPE})|(?P<wrong>\\|\[|&&|--|~~)|\]|.", re.DOTALL)


def exact_schema(schema: Any) -> Any:
    """The schema as llguidance enforces it in full. Raises InvalidRequestError that names a keyword."""
    found = list(schema_keywords(schema))
    has_refs = any(keyword == "$ref" for keyword, _, _ in found)
    for keyword, value, where in found:
        if keyword in OLD_KEYWORDS:
            raise _refusal(f"{keyword}, of draft 3 of JSON Schema; use a keyword of a later draft")
        if has_refs and keyword in ("$id", "id") and where is not schema and isinstance(value, str):
            raise _refusal(f"{keyword} inside of a schema with $ref")
        if keyword == "multipleOf" and isinstance(value, (int, float)) and _digits(value) > MAX_MULTIPLE:
            raise _refusal(f"multipleOf {value}; at most {MAX_MULTIPLE}, without the decimal point")
        if keyword in LITERALS and (one := _dropped(list(value) if keyword == "properties" else value)) is not None:
            raise _refusal(f"{keyword} with the control character {one!r}")
    return _exact(schema)


def _digits(number: float) -> int:
    """The digits of a number as a whole number: 25 for 0.025."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)) or "0")


def _dropped(value: Any) -> str | None:
    """A character in texts of a value that llguidance would leave out, for want of an escape."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if found := _CONTROL.search(one):
                return found[0]
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return None


def _exact(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    _check_count(schema)
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if restricts_nothing(name, value):
            continue
        if name in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            as_pattern = ecma_pattern if name == "patternProperties" else str
            made[name] = {as_pattern(key): _exact(one) for key, one in value.items()}
        elif name in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            made[name] = [_exact(one) for one in value]
        elif name in SCHEMA_KEYWORDS:
            made[name] = _exact(value)
        elif name == "pattern" and isinstance(value, str):
            made[name] = ecma_pattern(value)
        else:
            made[name] = value
    _tighten_bounds(made)
    pattern = FORMATS.get(made["format"]) if isinstance(made.get("format"), str) else None
    if pattern is not None:
        del made["format"]
        made["allOf"] = [*made.get("allOf", []), {"pattern": pattern}]
    return made


def _tighten_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds that llguidance cannot write, as those of int64: less than the schema allows, and all valid."""
    kind = schema.get("type")
    numbers = "number" in (kind if isinstance(kind, list) else [kind])
    bounds: list[tuple[str, int]] = [("minimum", -1), ("exclusiveMinimum", -1)]
    for name, sign in [*bounds, ("maximum", 1), ("exclusiveMaximum", 1)] if numbers else bounds:
        value = schema.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value * sign > MAX_BOUND:
            schema[name] = MAX_BOUND * sign


def _check_count(schema: Mapping[str, Any]) -> None:
    """Refuse minProperties that an object could meet by repeating a name."""
    least, properties, required = (schema.get(name) for name in ("minProperties", "properties", "required"))
    if not isinstance(least, (int, float)) or (
        schema.get("additionalProperties") is False and not schema.get("patternProperties")
    ):
        return
    known = set(properties) if isinstance(properties, Mapping) else set()
    sure = known & set(required) if isinstance(required, list) else set()
    if least > len(sure) + 1:
        raise _refusal(
            "minProperties of an object with additional properties, whose names may come twice; "
            "set additionalProperties to false"
        )


def ecma_pattern(pattern: str) -> str:
    """A pattern, which has the syntax of ECMA 262, in the syntax of Rust. Raises InvalidRequestError."""
    made: list[str] = []
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        assert piece is not None
        if piece["wrong"]:
            raise _wrong(pattern, at)
        if piece["class"]:
            whole = _class(pattern, at, piece.end())
            made.append(whole[0])
            at = whole[1]
        else:
            if _CONTROL_PIECE.match(piece[0]):
                raise _wrong(pattern, at)
            made.append(_OUTSIDE.get(piece[0], piece[0]))
            at = piece.end()
    return "".join(made)


def _class(pattern: str, begin: int, at: int) -> tuple[str, int]:
    """A class of characters, and where it ends."""
    made = [pattern[begin:at]]
    first = at
    while (piece := _IN_CLASS.match(pattern, at)) is not None:
        if piece["wrong"] or piece[0] in (r"\S", r"\b", r"\B") or (piece[0] == "]" and at == first):
            raise _wrong(pattern, at)
        made.append(_SPACES if piece[0] == r"\s" else piece[0])
        at = piece.end()
        if piece[0] == "]":
            if len(made) == 3 and _CONTROL_PIECE.match(made[1]):  # one character, as without the class
                raise _wrong(pattern, first)
            break
    return "".join(made), at


def _wrong(pattern: str, at: int) -> InvalidRequestError:
    return _refusal(f"the pattern {pattern[:100]!r}, for its {pattern[at : at + 4]!r} at {at}")


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"llguidance does not enforce {what}", "grammar")
