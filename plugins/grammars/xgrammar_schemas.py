"""The parts of JSON Schema and of regular expressions that XGrammar enforces in full; others are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammars import restricts_nothing, schema_keywords
from engine.plugins.grammars.xgrammar_limits import check_counts, check_expression

ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
    }
    | {"readOnly", "title", "writeOnly"}
)
"""Keywords that restrict nothing, or only hold schemas that others refer to."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords that hold schemas that others refer to."""
ALONE = ("$ref", "anyOf", "const", "enum")
"""Keywords next to which XGrammar ignores others."""
OF_TYPE: Mapping[str, frozenset[str]] = {
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
    "boolean": frozenset(),
    "integer": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}),
    "null": frozenset(),
    "number": frozenset(),
    "object": frozenset({"additionalProperties", "properties", "required"}),
    "string": frozenset({"maxLength", "minLength", "pattern"}),
}
"""Type -> the keywords that XGrammar enforces for it."""
_FLAT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class of characters."""


def closed_schema(schema: Any) -> Any:
    """The schema with every object that has `properties` closed to additional ones, which could repeat a name.

    Raises InvalidRequestError that names the keyword for what XGrammar would not enforce.
    """
    found = list(schema_keywords(schema))
    names = {f"#/{name}/{key}" for name in DEFINITIONS if isinstance(schema, Mapping) for key in schema.get(name) or ()}
    refs = [value for keyword, value, _ in found if keyword == "$ref"]
    for ref in refs:
        if ref != "#" and (ref not in names or re.search("[%~]", ref)):
            raise _refusal("$ref", f"to {str(ref)[:100]!r}; only # and #/$defs/NAME are allowed, with a plain name")
    if refs and any(keyword in ("$id", "id") and where is not schema for keyword, _, where in found):
        raise _refusal("$id", "inside of a schema with $ref")
    check_counts(schema)
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, bool):
        if not schema:
            raise _refusal("false", "as a schema")
        return schema
    if not isinstance(schema, Mapping):
        raise _refusal(str(schema)[:40], "as a schema")
    made = {name: value for name, value in schema.items() if not restricts_nothing(name, value)}
    for name in DEFINITIONS:
        if name in made:
            made[name] = {key: _closed(one) for key, one in _mapping(name, made[name]).items()}
    asserting = {name: value for name, value in made.items() if name not in ANNOTATIONS}
    alone = next((name for name in ALONE if name in asserting), None)
    if alone is not None:
        _check_alone(alone, asserting)
        if alone == "anyOf":
            made["anyOf"] = [_closed(one) for one in asserting["anyOf"]]
        return made
    kind = asserting.pop("type", None)
    if isinstance(kind, list):
        if asserting or not all(one in OF_TYPE for one in kind):
            raise _refusal("type", "as a list, next to other keywords; use anyOf")
        return made
    if kind is not None and kind not in OF_TYPE:
        raise _refusal(f"the type {kind}")
    for name in asserting:
        if name not in OF_TYPE.get(kind, ()):
            raise _refusal(name, "" if kind is None else f"for the type {kind}")
    return _CLOSED[kind](made) if kind in _CLOSED else made


def check_pattern(pattern: str) -> None:
    """Raise InvalidRequestError for anchors inside a regular expression, which XGrammar ignores, and for its flags."""
    check_expression(pattern)
    rest = _FLAT.sub(lambda found: " " * len(found[0]), pattern)
    if "^" in rest[1:] or "$" in rest[:-1]:
        raise _refusal("^ or $", f"inside the pattern {pattern[:100]!r}")
    if re.search(r"\(\?(?!:)", rest):
        raise _refusal("(?", f"in the pattern {pattern[:100]!r}")


def _check_alone(name: str, asserting: Mapping[str, Any]) -> None:
    others = set(asserting) - {name}
    values = {"const": [asserting.get("const")], "enum": asserting.get("enum")}.get(name)
    if name in ("const", "enum") and others == {"type"}:
        kinds = asserting["type"] if isinstance(asserting["type"], list) else [asserting["type"]]
        if isinstance(values, list) and all(_type(value) in _with_integers(kinds) for value in values):
            return
    if others:
        raise _refusal(min(others), f"next to {name}")
    if name in ("anyOf", "enum") and not (isinstance(asserting[name], list) and asserting[name]):
        raise _refusal(name, "unless it is a list that is not empty")


def _closed_object(schema: dict[str, Any]) -> dict[str, Any]:
    properties = _mapping("properties", schema.get("properties", {}))
    required = schema.get("required", [])
    missing = [name for name in required if name not in properties] if isinstance(required, list) else [required]
    if missing:
        raise _refusal("required", f"with {str(missing[0])[:40]!r}, which properties lacks")
    more = schema.get("additionalProperties", not properties)
    if more not in (False, True) or (more is True and properties and "additionalProperties" in schema):
        raise _refusal("additionalProperties", "other than false next to properties, and as a schema")
    made = {**schema, "additionalProperties": more}
    if properties:
        made["properties"] = {name: _closed(one) for name, one in properties.items()}
    return made


def _closed_array(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if "items" in made:
        if isinstance(made["items"], list):
            raise _refusal("items", "as a list; use prefixItems")
        made["items"] = made["items"] if made["items"] is False else _closed(made["items"])
    if "prefixItems" in made:
        made["prefixItems"] = [_closed(one) for one in made["prefixItems"]]
    return made


def _checked_string(schema: dict[str, Any]) -> dict[str, Any]:
    if "pattern" in schema:
        for name in ("maxLength", "minLength"):
            if name in schema:
                raise _refusal(name, "next to pattern")
        check_pattern(str(schema["pattern"]))
        _check_plain(str(schema["pattern"]))
        return schema
    return _with_length_as_pattern(schema)


def _check_plain(pattern: str) -> None:
    """Refuse a pattern whose matches, which XGrammar puts between quotes as they are, may not be JSON of that text."""
    shown = repr(pattern[:100])
    if not re.fullmatch(r"\^[^|]*\$", pattern):
        raise _refusal("pattern", f"unless it has the form ^...$ without |, unlike {shown}")
    ranges = re.findall(r"(?<=[^\\])(.)-(.)", pattern)
    plain = re.fullmatch(r'(?:[^."\\\x00-\x1f]|\\[dw]|\\[^\w"\\\s])*', pattern) and "[^" not in pattern
    if not plain or not all(re.fullmatch("[a-z]{2}|[A-Z]{2}|[0-9]{2}", low + high) for low, high in ranges):
        raise _refusal("pattern", f"that may match quotes, backslashes or control characters, as {shown} may")


def _with_length_as_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a pattern in place of minLength and maxLength, for which XGrammar 0.2.8 lets control characters
    through. The pattern leaves escapes out: that is less than the schema allows, and all valid."""
    made = {name: value for name, value in schema.items() if name not in ("maxLength", "minLength")}
    if len(made) == len(schema):
        return schema
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    for name, value in (("minLength", low), ("maxLength", low if high is None else high)):
        if type(value) is not int or value < 0:
            raise _refusal(name, "unless it is a whole number from 0 on")
    if high is not None and high < low:
        raise _refusal("maxLength", "below minLength")
    made["pattern"] = rf'^[^"\\\x00-\x1f\ud800-\udfff]{{{low},{"" if high is None else high}}}$'
    return made


_CLOSED = {"array": _closed_array, "object": _closed_object, "string": _checked_string}


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refusal(name, "unless it is an object")
    return value


def _with_integers(kinds: list[Any]) -> list[Any]:
    return [*kinds, "integer"] if "number" in kinds else kinds


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def _refusal(name: str, where: str = "") -> InvalidRequestError:
    return InvalidRequestError(f"xgrammar does not enforce {name}{' ' * bool(where)}{where}", "grammar")
