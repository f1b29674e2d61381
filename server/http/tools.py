"""The tools that a conversation offers to the model, and which requests about them the server can honour."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.protocols import FunctionTool, ToolChoice
from engine.server.front_end.errors import excerpt
from engine.server.http.errors import invalid

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names that no format of a model confuses with something else."""
NO_PARAMETERS = {"type": "object", "properties": {}}
"""Schema of a function that takes none; chat templates expect a schema."""


def offered_tools(
    tools: Sequence[FunctionTool], choice: ToolChoice, *, readable: bool, parameter: str = "tool_choice"
) -> list[dict[str, Any]]:
    """The tools as chat templates expect them; none if the choice is "none".

    They do not depend on which of them may be called, so that prompts keep their prefixes. readable: whether the server
    can read the model's calls. parameter: that of `choice`. Raises ApiError for what cannot be honoured.
    """
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        _check(tool)
        if tool.name in found:
            where = f"{tool.where}.name"
            raise invalid(f"{where} is {excerpt(tool.name)!r}, as of another tool; give each its own name", where)
        found[tool.name] = _template_tool(tool)
    if choice.forced and not found:
        raise invalid(f"{parameter} asks for a tool call, but the request has no tools", parameter)
    if choice.mode != "none":
        _check_names(choice, found, parameter)
    if not found or choice.mode == "none":
        return []
    if not readable:
        raise invalid(
            "this server cannot read tool calls of this model; start it with --parser, if there is a parser of the "
            "model's format, or leave tools out",
            "tools",
        )
    return list(found.values())


def _check(tool: FunctionTool) -> None:
    if not TOOL_NAME.fullmatch(tool.name):
        raise invalid(
            f"{tool.where}.name is {excerpt(tool.name)!r}; use at most 128 letters, digits and characters of _.:/-",
            f"{tool.where}.name",
        )


def _check_names(choice: ToolChoice, found: Mapping[str, Any], parameter: str) -> None:
    """Refuse a choice of tools that are not offered."""
    named = {choice.name} if choice.name is not None else set()
    for name in sorted(named | (choice.allowed or frozenset())):
        if name not in found:
            raise invalid(f"{parameter} names {excerpt(name)!r}, which is none of the tools", parameter)
    if choice.allowed is not None and not choice.allowed:
        raise invalid(f"{parameter} allows no tools; give none instead", parameter)


def _template_tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}
