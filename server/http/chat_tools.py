"""The tools of a chat completion: their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.protocols import FunctionTool, ToolChoice, excerpt
from engine.server.http.errors import invalid

MODES = {"auto": ToolChoice("auto"), "none": ToolChoice("none"), "required": ToolChoice("required")}
"""`tool_choice` as a text."""


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Only false: nothing makes the model keep to the schema."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of a request."""

    type: str
    function: Function | None = None
    custom: Any = None


def function_tools(tools: Sequence[Tool] | None) -> list[FunctionTool]:
    """The functions among the tools of a chat. Raises ApiError for other tools."""
    return [_function_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def chosen_tools(given: str | dict[str, Any] | None) -> ToolChoice:
    """`tool_choice` of a chat. Raises ApiError."""
    if given is None:
        return ToolChoice()
    if isinstance(given, str) and given in MODES:
        return MODES[given]
    if isinstance(given, dict) and given.get("type") == "function":
        function = given.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            return ToolChoice("required", name)
    raise invalid(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "..."}}', "tool_choice"
    )


def _function_tool(tool: Tool, where: str) -> FunctionTool:
    if tool.type != "function":
        raise invalid(
            f"{where}.type is {excerpt(tool.type)!r}; only tools of type function are supported", f"{where}.type"
        )
    if tool.function is None:
        raise invalid(f"{where}.function is missing", f"{where}.function", "missing_required_parameter")
    if tool.custom is not None:
        raise invalid(f"{where}.custom is allowed only in a tool of type custom", f"{where}.custom")
    return FunctionTool(
        name=tool.function.name,
        description=tool.function.description,
        parameters=tool.function.parameters,
        strict=bool(tool.function.strict),
        where=f"{where}.function",
    )
