"""The tools of a response: those that are offered to the model as functions, and those that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from attrs import field, frozen

from engine.core.parsers import custom_parameters
from engine.core.protocols import ApiError, FunctionTool, ToolChoice, excerpt

MODES = ("auto", "none", "required")


class FunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of type function."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Null counts as false."""
    defer_loading: bool | None = None
    """Has no effect: all tools are offered from the beginning."""


class CustomSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of type custom: its input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = None


class NamespaceSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of type namespace: several tools."""

    type: Literal["namespace"]
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


@frozen
class OfferedTool:
    """A tool as the client knows it."""

    name: str
    custom: bool = False
    namespace: str | None = None


@frozen
class Tools:
    """The tools of one request."""

    functions: tuple[FunctionTool, ...] = ()
    offered: Mapping[str, OfferedTool] = field(factory=dict)
    """By the name that the model sees."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """`tools` of the response: those that are offered, as the client gave them."""
    skipped: tuple[str, ...] = ()
    """Tools that are not offered: the type, after its namespace if it has one; of a custom tool also the name."""


def offered_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> Tools:
    """Sort the tools of a request. Raises ApiError for a malformed one.

    Offered are functions, and custom tools whose input is any text or one that matches a regular expression. The server
    could not run other tools, or not enforce their grammar. Coding agents always send some of these next to their
    functions.
    """
    functions: list[FunctionTool] = []
    offered: dict[str, OfferedTool] = {}
    shown: list[Mapping[str, Any]] = []
    skipped: list[str] = []
    for index, tool in enumerate(given or ()):
        found = list(_flattened(tool, f"tools[{index}]", None, skipped))
        for function, known in found:
            functions.append(function)
            offered[function.name] = known
        if found:
            shown.append(tool)
    return Tools(tuple(functions), offered, tuple(shown), tuple(skipped))


def read_choice(given: str | Mapping[str, Any] | None, tools: Tools) -> ToolChoice:
    """`tool_choice` of a response. Raises ApiError, also for a tool that is not offered."""
    match given:
        case None:
            return ToolChoice()
        case "auto" | "none" | "required":
            return ToolChoice(given)
        case {"type": "function" | "custom", "name": str(name)}:
            _check_offered(name, tools)
            return ToolChoice("required", name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*named]}:
            names = [one.get("name") if isinstance(one, dict) else None for one in named]
            for one in names:
                _check_offered(one, tools)
            return ToolChoice(mode, allowed=frozenset(map(str, names)))
    raise ApiError(
        400,
        f'tool_choice must be {", ".join(MODES)}, {{"type": "function", "name": "..."}} or {{"type": "allowed_tools", '
        '"mode": "auto", "tools": [...]}; this server runs no tools itself',
        param="tool_choice",
    )


def _check_offered(name: Any, tools: Tools) -> None:
    if not isinstance(name, str) or name not in tools.offered:
        raise ApiError(
            400,
            f"tool_choice names {excerpt(repr(name))}, which is none of the functions that are offered to the model",
            param="tool_choice",
        )


def _flattened(
    tool: Mapping[str, Any], where: str, namespace: str | None, skipped: list[str]
) -> Iterator[tuple[FunctionTool, OfferedTool]]:
    """The functions that a tool is offered as; appends what is not offered to `skipped`."""
    kind = tool.get("type")
    if kind == "function":
        function = _convert(tool, FunctionSpec, where)
        yield (
            FunctionTool(
                name=offered_name(function.name, namespace),
                description=function.description,
                parameters=function.parameters,
                strict=bool(function.strict),
                where=where,
            ),
            OfferedTool(function.name, namespace=namespace),
        )
    elif kind == "custom":
        custom = _convert(tool, CustomSpec, where)
        pattern: str | None = None
        match custom.format:
            case None | {"type": "text"}:
                pass
            case {"type": "grammar", "syntax": "regex", "definition": str(definition)}:
                pattern = definition
            case _:
                skipped.append(f"custom {offered_name(custom.name, namespace)}")
                return
        yield (
            FunctionTool(
                name=offered_name(custom.name, namespace),
                description=custom.description,
                parameters=custom_parameters(pattern),
                strict=True,
                where=where,
            ),
            OfferedTool(custom.name, custom=True, namespace=namespace),
        )
    elif kind == "namespace" and namespace is None:
        members = _convert(tool, NamespaceSpec, where)
        for index, member in enumerate(members.tools):
            yield from _flattened(member, f"{where}.tools[{index}]", members.name, skipped)
    elif isinstance(kind, str):
        skipped.append(offered_name(excerpt(kind), namespace))
    else:
        raise ApiError(400, f"{where}.type is missing", param=f"{where}.type", code="missing_required_parameter")


def _convert(tool: Mapping[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert({name: value for name, value in tool.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from None
