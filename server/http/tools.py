"""The tools that a chat offers to the model: their JSON, and which requests about them the server can honour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.server.front_end.errors import excerpt
from engine.server.http.errors import invalid

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names that no format of a model confuses with something else."""
NO_PARAMETERS = {"type": "object", "properties": {}}
"""Schema of a function that takes none; chat templates expect a schema."""


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


def offered_tools(
    tools: Sequence[Tool] | None, tool_choice: str | dict[str, Any] | None, *, readable: bool
) -> list[dict[str, Any]]:
    """The tools as chat templates expect them; none if the model is to call none.

    readable: whether the server can read the model's calls. Raises ApiError for what would change the answer and is not
    supported.
    """
    if tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice must be none or auto: this server cannot make the model call a tool", "tool_choice")
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        name, where = _checked_name(tool, f"tools[{index}]")
        if name in found:
            raise invalid(f"{where} is {excerpt(name)!r}, as of another tool; give each its own name", where)
        found[name] = _template_tool(tool)
    if not found or tool_choice == "none":
        return []
    if not readable:
        raise invalid(
            "this server cannot read tool calls of this model; start it with --parser, if the model writes one of its "
            "formats, or leave tools out",
            "tools",
        )
    return list(found.values())


def _checked_name(tool: Tool, where: str) -> tuple[str, str]:
    """The name of a tool's function, and where it stands. Raises ApiError."""
    if tool.type != "function":
        raise invalid(
            f"{where}.type is {excerpt(tool.type)!r}; only tools of type function are supported", f"{where}.type"
        )
    if tool.function is None:
        raise invalid(f"{where}.function is missing", f"{where}.function", "missing_required_parameter")
    if tool.custom is not None:
        raise invalid(f"{where}.custom is allowed only in a tool of type custom", f"{where}.custom")
    name = tool.function.name
    if not TOOL_NAME.fullmatch(name):
        raise invalid(
            f"{where}.function.name is {excerpt(name)!r}; use at most 128 letters, digits and characters of _.:/-",
            f"{where}.function.name",
        )
    if tool.function.strict:
        raise invalid(
            f"{where}.function.strict must be false: this server cannot make the model keep to a schema",
            f"{where}.function.strict",
        )
    return name, f"{where}.function.name"


def _template_tool(tool: Tool) -> dict[str, Any]:
    assert tool.function is not None
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    return {"type": "function", "function": function}
