"""Compiles structural tags: relaxes a refused schema if its tool is not strict, and says which part is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


def compile_with_tools(grammar: Grammar, compile_one: Callable[[Grammar], CompiledGrammar]) -> CompiledGrammar:
    """Compile a grammar; if it is a structural tag, its schemas may have labels.

    Where a backend refuses the schema of a tool that is not strict, the refused arguments may be anything, or all of
    them any object. Raises InvalidRequestError that names the tool if it is strict, and for another part of a
    structural tag that of the part alone, which the client knows.
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
    """A refused schema of arguments with anything in place of each property that is refused; at worst, any object."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ANY_OBJECT
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    kept = {
        name: one if not isinstance(one, dict) or _problem({**definitions, **one}, compile_one) is None else True
        for name, one in properties.items()
    }
    made = {**schema, "properties": kept}
    return made if _problem(made, compile_one) is None else ANY_OBJECT


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
