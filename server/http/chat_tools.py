"""The tools of a chat completion: their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.core.parsers import custom_parameters
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
    """Whether the arguments must match the schema in every respect."""


class CustomFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the input of a custom tool must be."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """A grammar of the input of a custom tool."""

    syntax: Literal["regex", "lark"]
    definition: str


class Custom(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of a request."""

    type: str
    function: Function | None = None
    custom: Custom | None = None


def function_tools(tools: Sequence[Tool] | None) -> list[FunctionTool]:
    """The tools of a chat as functions. Raises ApiError for other tools."""
    return [_function_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def chosen_tools(given: str | dict[str, Any] | None) -> ToolChoice:
    """`tool_choice` of a chat. Raises ApiError."""
    if given is None:
        return ToolChoice()
    if isinstance(given, str) and given in MODES:
        return MODES[given]
    if isinstance(given, dict):
        if (name := _chosen_name(given)) is not None:
            return ToolChoice("required", name)
        if given.get("type") == "allowed_tools":
            return _allowed(given.get("allowed_tools"))
    raise invalid(
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name": "..."}} or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
        "tool_choice",
    )


def _chosen_name(given: Any) -> str | None:
    """The name in {"type": "function", "function": {"name": ...}}, or the same with custom; None if it is neither."""
    match given:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None


def _allowed(given: Any) -> ToolChoice:
    """The choice among a part of the tools."""
    where = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or given.get("mode") not in ("auto", "required"):
        raise invalid(f"{where}.mode must be auto or required", f"{where}.mode")
    tools = given.get("tools")
    names = [_chosen_name(tool) for tool in tools] if isinstance(tools, list) else [None]
    if None in names:
        raise invalid(
            f'{where}.tools must be a list of {{"type": "function", "function": {{"name": "..."}}}}', f"{where}.tools"
        )
    return ToolChoice(given["mode"], allowed=frozenset(name for name in names if name is not None))


def _function_tool(tool: Tool, where: str) -> FunctionTool:
    if tool.type == "custom":
        return _custom_tool(tool, where)
    if tool.type != "function":
        raise invalid(
            f"{where}.type is {excerpt(tool.type)!r}; only tools of type function and custom are supported",
            f"{where}.type",
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


def custom_names(tools: Sequence[Tool] | None) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if tool.custom is not None)


def _custom_tool(tool: Tool, where: str) -> FunctionTool:
    """A custom tool as a function with one argument, to which a grammar keeps the model."""
    if tool.custom is None:
        raise invalid(f"{where}.custom is missing", f"{where}.custom", "missing_required_parameter")
    if tool.function is not None:
        raise invalid(f"{where}.function is allowed only in a tool of type function", f"{where}.function")
    pattern = None
    if tool.custom.format is not None and tool.custom.format.type == "grammar":
        grammar = tool.custom.format.grammar
        if grammar is None:
            name = f"{where}.custom.format.grammar"
            raise invalid(f"{name} is missing", name, "missing_required_parameter")
        if grammar.syntax != "regex":
            raise invalid(
                f"{where}.custom.format.grammar.syntax must be regex: this server cannot enforce lark within the JSON "
                "in which models write calls",
                f"{where}.custom.format.grammar.syntax",
            )
        pattern = grammar.definition
    return FunctionTool(
        name=tool.custom.name,
        description=tool.custom.description,
        parameters=custom_parameters(pattern),
        strict=True,
        where=f"{where}.custom",
    )
