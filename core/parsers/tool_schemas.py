"""The JSON schemas of tools' arguments, as grammars of calls hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.core.errors import InvalidRequestError
from engine.core.grammars import SCHEMA_KEYWORDS, SCHEMA_LIST_KEYWORDS, SCHEMA_MAP_KEYWORDS, TOOL_LABEL

ANNOTATIONS: Final = frozenset({"$comment", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"})
"""Keywords that restrict nothing, and are most of the text of an agent's tools."""


def arguments_schema(tool: Mapping[str, Any], *, strict: bool, exact: bool) -> dict[str, Any]:
    """The schema that the arguments of a call must match, which is always one of objects.

    tool: as in OpenAI's API. strict: whether a schema that cannot be enforced is refused, instead of replaced by that
    of any object. exact: whether the tool's own schema counts even if the tool is not strict. Raises
    InvalidRequestError for a schema of anything but objects.
    """
    function = tool["function"]
    given = function.get("parameters")
    if not exact and not strict:
        return {"type": "object"}
    try:
        found = {"properties": {}, "additionalProperties": False} if given is None else without_annotations(given)
    except RecursionError:
        raise InvalidRequestError(
            f"the parameters of the tool {function['name']} are nested too deep; use $ref", "tools"
        ) from None
    kind = found.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"the parameters of the tool {function['name']} are a schema of the type {str(kind)[:40]!r}; arguments are "
            "always an object",
            "tools",
        )
    return {**found, "type": "object", TOOL_LABEL: {"name": function["name"], "strict": strict}}


def without_annotations(schema: Any) -> Any:
    """A schema without the keywords that restrict nothing."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ANNOTATIONS or name == TOOL_LABEL:
            continue
        if name in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            found[name] = {key: without_annotations(one) for key, one in value.items()}
        elif name in SCHEMA_LIST_KEYWORDS and isinstance(value, Sequence) and not isinstance(value, str):
            found[name] = [without_annotations(one) for one in value]
        else:
            found[name] = without_annotations(value) if name in SCHEMA_KEYWORDS else value
    return found
