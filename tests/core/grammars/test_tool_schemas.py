from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import TOOL_LABEL, Grammar, compile_with_tools
from engine.core.grammars.tool_schemas import MAX_COMPILATIONS


class Backend:
    """Refuses a grammar with the keyword "odd", by a sentence with the kind of the grammar."""

    def __init__(self) -> None:
        self.accepted: list[Grammar] = []
        self.compilations = 0

    def compile(self, grammar: Grammar) -> Any:
        self.compilations += 1
        if '"odd"' in grammar.source:
            raise InvalidRequestError(f"refuses a {grammar.kind}", "grammar")
        self.accepted.append(grammar)


def tag(*schemas: dict[str, Any]) -> Grammar:
    elements = [{"type": "json_schema", "json_schema": schema} for schema in schemas]
    return Grammar.structural_tag({"type": "sequence", "elements": elements})


def tool(*, strict: bool = False, **schema: Any) -> dict[str, Any]:
    return {"type": "object", **schema, TOOL_LABEL: {"name": "f", "strict": strict}}


def compiled(*schemas: dict[str, Any], backend: Backend | None = None) -> list[dict[str, Any]]:
    """The schemas with which a structural tag is accepted."""
    backend = backend or Backend()
    compile_with_tools(tag(*schemas), backend.compile)
    elements = json.loads(backend.accepted[-1].source)["format"]["elements"]
    return [element["json_schema"] for element in elements]


def test_only_the_refused_arguments_are_free_when_a_tool_is_not_strict() -> None:
    kept = {"type": "string", "enum": ["a"]}
    properties = {"a": kept, "b": {"type": "object", "odd": 1}, "c": {"$ref": "#/$defs/c"}, "d": True}
    rest = {"required": ["a", "b"], "additionalProperties": False, "$defs": {"c": {"type": "integer"}}}
    [found] = compiled(tool(properties=properties, **rest))
    assert found == {"type": "object", "properties": {**properties, "b": True}, **rest}


@pytest.mark.parametrize(("count", "refused"), [(1000, [0]), (1000, [333, 999]), (60, range(60)), (1, [0])])
def test_few_compilations_find_the_refused_arguments_when_there_are_many(count: int, refused: Sequence[int]) -> None:
    properties = {f"p{at}": {"odd": 1} if at in refused else {"type": "string"} for at in range(count)}
    backend = Backend()
    [found] = compiled(tool(properties=properties), backend=backend)
    assert [name for name, one in found["properties"].items() if one is True] == [f"p{at}" for at in refused]
    assert backend.compilations < 2 * min(count, len(refused) * 10) + 10


def test_the_neighbours_of_refused_arguments_are_free_when_very_many_are_refused() -> None:
    properties = {f"p{at}": {"odd": 1} if at < 500 else {"type": "string"} for at in range(1000)}
    backend = Backend()
    [found] = compiled(tool(properties=properties), backend=backend)
    assert all(found["properties"][f"p{at}"] is True for at in range(500))
    assert found["properties"]["p999"] == {"type": "string"}
    assert backend.compilations < MAX_COMPILATIONS + 10


@pytest.mark.parametrize(
    "schema",
    [
        {"odd": 1},
        {"properties": {"a": {"type": "string"}}, "odd": 1},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"odd": 1}}},
        {"properties": 1, "odd": 1},
    ],
)
def test_arguments_are_any_object_when_more_than_a_property_is_refused(schema: dict[str, Any]) -> None:
    other = {"type": "object", "properties": {"x": {"type": "string"}}}
    assert compiled(tool(**schema), other) == [{"type": "object"}, other]


def test_a_tool_is_named_when_it_is_strict() -> None:
    with pytest.raises(InvalidRequestError, match=r"the tool f is strict.* refuses a json_schema"):
        compiled(tool(strict=True, properties={"a": {"odd": 1}}))


def test_a_refusal_is_that_of_the_part_when_a_structural_tag_is_refused() -> None:
    for schemas in ([{"odd": 1}], [tool(properties={"a": {"odd": 1}}), {"odd": 1}]):
        with pytest.raises(InvalidRequestError, match="refuses a json_schema"):
            compiled(*schemas)
    with pytest.raises(InvalidRequestError, match="refuses a structural_tag"):
        compile_with_tools(Grammar.structural_tag({"type": "const_string", "value": "odd"}), Backend().compile)
    with pytest.raises(InvalidRequestError, match="refuses a json_schema"):
        compile_with_tools(Grammar.json_schema({"odd": 1}), Backend().compile)
