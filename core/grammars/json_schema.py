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
