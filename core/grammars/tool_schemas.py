"""Compiles structural tags: relaxes a refused schema if its tool is not strict, and says which part is refused."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar
from engine.core.grammars.structural_tag_forms import part_grammars

if TYPE_CHECKING:
    from engine.core.grammars.base import CompiledGrammar

TOOL_LABEL: Final = "x-engine-tool"
"""Keyword of a schema: {"name": of its tool, "strict": whether the schema must be enforced}. Backends never see it."""
ANY_OBJECT: Final = {"type": "object"}
DEFINITIONS: Final = ("$defs", "definitions")
"""Keywords of a schema that hold schemas to which its properties may refer."""
MAX_COMPILATIONS: Final = 128
"""Compilations that look for the refused properties of one schema. Each contains all definitions of the schema."""


def compile_with_tools(grammar: Grammar, compile_one: Callable[[Grammar], CompiledGrammar]) -> CompiledGrammar:
    """Compile a grammar; if it is a structural tag, its schemas may have labels.

    If a backend refuses the schema of a tool that is not strict, each refused property accepts anything; if that is
    refused too, all arguments together may be any object. Raises InvalidRequestError: for a strict tool, one that names
    the tool; for another part of a structural tag, that of the part alone, which the client knows.
    """
    if grammar.kind != STRUCTURAL_TAG:
        return compile_one(grammar)
    source = json.loads(grammar.source)
    labelled = [(part, part["json_schema"].pop(TOOL_LABEL)) for part in _labelled(source)]
    try:
        return compile_one(Grammar(grammar.kind, _source(source)))
    except InvalidRequestError:
        relaxed = False
        for part, label in labelled:
            problem = _problem(part["json_schema"], compile_one)
            if problem is None:
                continue
            if label["strict"]:
                raise InvalidRequestError(
                    f"the tool {label['name']} is strict, but its parameters cannot be enforced: {problem}", "tools"
                ) from None
            part["json_schema"], relaxed = _relaxed(part["json_schema"], compile_one), True
        for alone in part_grammars(_source(source)):
            if alone.kind in (JSON_SCHEMA, REGEX):
                compile_one(alone)
        if not relaxed:
            raise
    return compile_one(Grammar(grammar.kind, _source(source)))


def _relaxed(schema: dict[str, Any], compile_one: Callable[[Grammar], CompiledGrammar]) -> dict[str, Any]:
    """The schema with each refused property accepting anything; if that is refused too, any object."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ANY_OBJECT
    definitions: dict[str, Any] = {name: schema[name] for name in DEFINITIONS if name in schema}
    refused = _refused(properties, definitions, compile_one)
    made = {**schema, "properties": {name: True if name in refused else one for name, one in properties.items()}}
    return made if _problem(made, compile_one) is None else ANY_OBJECT


def _refused(
    properties: Mapping[str, Any], definitions: Mapping[str, Any], compile_one: Callable[[Grammar], CompiledGrammar]
) -> frozenset[str]:
    """The names of the refused properties, found by halving groups that contain some.

    After MAX_COMPILATIONS, all properties of the remaining groups count as refused.
    """
    groups = deque([list(properties)])
    refused: list[str] = []
    for _ in range(MAX_COMPILATIONS):
        if not groups:
            break
        group = groups.popleft()
        schema = {**ANY_OBJECT, **definitions, "properties": {name: properties[name] for name in group}}
        if _problem(schema, compile_one) is None:
            continue
        if len(group) > 1:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
        else:
            refused += group
    return frozenset(refused).union(*groups)


def _problem(schema: Any, compile_one: Callable[[Grammar], CompiledGrammar]) -> InvalidRequestError | None:
    """Why a schema is refused; None if it is not."""
    try:
        compile_one(Grammar.json_schema(schema))
    except InvalidRequestError as error:
        return error
    return None


def _labelled(source: Any) -> Iterator[dict[str, Any]]:
    """The formats of JSON in a structural tag whose schemas have labels."""
    waiting = [source]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, dict) and one.get("type") == "json_schema":
            if isinstance(one.get("json_schema"), dict) and TOOL_LABEL in one["json_schema"]:
                yield one
        elif isinstance(one, dict):
            waiting += reversed(one.values())


def _source(source: Any) -> str:
    return json.dumps(source, ensure_ascii=False)
