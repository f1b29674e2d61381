"""Finds the keywords of a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA_KEYWORDS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose value is a schema."""
SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
"""Keywords whose value may be a list of schemas."""
SCHEMA_MAP_KEYWORDS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose value maps names to schemas."""
_ANY_TEXT_KEYWORDS = frozenset({"$comment", "description", "title", "type"})
"""Keywords that a schema accepting every string may have."""


def restricts_nothing(keyword: str, value: Any) -> bool:
    """Whether a keyword has a value without effect, as schema generators write."""
    if keyword == "uniqueItems":
        return value is False
    if keyword == "propertyNames":
        return _allows_all_texts(value)
    if keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        return bool(value == {})
    return keyword in ("unevaluatedItems", "unevaluatedProperties") and (value is True or value == {})


def _allows_all_texts(schema: Any) -> bool:
    """Whether the schema obviously accepts every string."""
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type", "string")
    return schema.keys() <= _ANY_TEXT_KEYWORDS and "string" in (kinds if isinstance(kinds, list) else [kinds])


def schema_keywords(schema: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Every keyword of a schema and of the schemas in it: (keyword, its value, the schema that it stands in)."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        for name, value in one.items():
            yield name, value, one
            if name in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
                waiting += value.values()
            elif name in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                waiting += value
            elif name in SCHEMA_KEYWORDS:
                waiting.append(value)
