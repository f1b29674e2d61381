"""Compiles structural tags whose schemas name their tools; relaxes a refused schema if its tool is not strict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import Grammar

if TYPE_CHECKING:
    from engine.core.grammars.base import CompiledGrammar

TOOL_LABEL: Final = "x-engine-tool"
"""Keyword of a schema: {"name": of its tool, "strict": whether the schema must be enforced}. Backends never see it."""
ANY_OBJECT: Final = {"type": "object"}


def compile_with_tools(grammar: Grammar, compile_one: Callable[[Grammar], CompiledGrammar]) -> CompiledGrammar:
    """Compile a grammar whose schemas may have labels.

    Where a backend refuses the schema of a tool that is not strict, the arguments may be any object. Raises
    InvalidRequestError that names the tool if it is strict.
    """
    if f'"{TOOL_LABEL}"' not in grammar.source:
        return compile_one(grammar)
    source = json.loads(grammar.source)
    labelled = [(part, part["json_schema"].pop(TOOL_LABEL)) for part in _labelled(source)]
    try:
        return compile_one(Grammar(grammar.kind, _source(source)))
    except InvalidRequestError:
        relaxed = False
        for part, label in labelled:
            try:
                compile_one(Grammar.json_schema(part["json_schema"]))
            except InvalidRequestError as error:
                if label["strict"]:
                    raise InvalidRequestError(
                        f"the tool {label['name']} is strict, but its parameters cannot be enforced: {error}", "tools"
                    ) from None
                part["json_schema"], relaxed = ANY_OBJECT, True
        if not relaxed:
            raise
    return compile_one(Grammar(grammar.kind, _source(source)))


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
