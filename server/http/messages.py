"""The messages of a chat: their JSON, and how a chat template receives them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.core.protocols import convert
from engine.server.front_end.errors import ApiError, excerpt
from engine.server.http.errors import invalid

ASSISTANT = "assistant"
TOOL = "tool"
ROLES = {"system": "system", "developer": "system", "user": "user", ASSISTANT: ASSISTANT, TOOL: TOOL}
"""Roles of messages, and their names in chat templates (OpenAI renamed system to developer)."""


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function that an assistant called."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    # What clients add to an earlier answer; without effect.
    parsed_arguments: Any = None
    """Of OpenAI's clients: the arguments, decoded."""
    description: str | None = None
    """Of Hugging Face's client."""


class CustomCall(msgspec.Struct, forbid_unknown_fields=True):
    """The custom tool that an assistant called."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One tool call of an assistant's message."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    index: int | None = None
    """Sent back by clients that join the pieces of a stream; has no effect."""


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    """Null or absent only from an assistant, who may have called tools instead."""
    name: str | None = None
    """Of the participant or the tool, for chat templates that show it."""
    tool_calls: list[ToolCall] | None = None
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    reasoning_content: str | None = None
    """Of an assistant: reasoning that an earlier answer came with."""
    reasoning: str | None = None
    """Another name of reasoning_content."""
    refusal: str | None = None
    """Of an assistant: what it said instead of content."""
    annotations: list[Any] | None = None
    """Of an earlier answer; ignored: prompts have no annotations."""
    provider_specific_fields: dict[str, Any] | None = None
    """Of an earlier answer: litellm's notes on its fields."""
    parsed: Any = None
    """Of an earlier answer; ignored: its content, as OpenAI's clients have decoded it."""
    # OpenAI's client sends these as null when an earlier answer is part of the chat.
    audio: None = None
    function_call: None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an assistant's content that says what the assistant refused."""

    type: Literal["refusal"]
    refusal: str


def template_message(message: Message, where: str) -> dict[str, Any]:
    """A message as Conversation has them: `content` is a text, the arguments of a tool call are as they were sent.

    where: the message's position, for errors. Raises ApiError.
    """
    if message.role not in ROLES:
        raise invalid(
            f"{where}.role is {excerpt(message.role)!r}; it must be one of {', '.join(ROLES)}", f"{where}.role"
        )
    found: dict[str, Any] = {"role": ROLES[message.role], "content": _content(message, where)}
    if message.name is not None:
        found["name"] = message.name
    if message.role == TOOL:
        if message.tool_call_id is None:
            name = f"{where}.tool_call_id"
            raise invalid(f"{name} is missing; give the id of the call", name, "missing_required_parameter")
        found["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise _misplaced(where, "tool_call_id", TOOL)
    if message.role == ASSISTANT:
        found |= _of_assistant(message, where)
        return found
    for field in ("tool_calls", "reasoning_content", "reasoning", "refusal", "provider_specific_fields"):
        if getattr(message, field):
            raise _misplaced(where, field, ASSISTANT)
    return found


def _of_assistant(message: Message, where: str) -> dict[str, Any]:
    """What only an assistant's message has: reasoning and tool calls."""
    found: dict[str, Any] = {}
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise invalid(f"{where} has reasoning and reasoning_content; give one of them", f"{where}.reasoning")
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call, f"{where}.tool_calls[{index}]")}
            for index, call in enumerate(message.tool_calls)
        ]
    return found


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    """The function of a call; that of a custom tool has its input as the only argument."""
    given = call.custom if call.type == "custom" else call.function
    if given is None or (call.custom is not None and call.function is not None):
        other = "function" if call.type == "custom" else "custom"
        raise invalid(f"{where} has the type {call.type}: give {call.type}, and no {other}", f"{where}.{call.type}")
    if isinstance(given, CustomCall):
        return {"name": given.name, "arguments": {"input": given.input}}
    return {"name": given.name, "arguments": given.arguments}


def _content(message: Message, where: str) -> str:
    """The content as one text, parts joined by newlines. Raises ApiError for other parts than text."""
    assistant = message.role == ASSISTANT
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if not assistant:
            name = f"{where}.content"
            raise invalid(f"{name} is missing", name, "missing_required_parameter")
        return message.refusal or ""
    texts = []
    for index, part in enumerate(message.content):
        try:
            if assistant and part.get("type") == "refusal":
                texts.append(convert(part, RefusalPart, "").refusal)
            else:
                texts.append(convert(part, TextPart, "").text)
        except ApiError:
            name = f"{where}.content[{index}]"
            raise invalid(
                f'{name} must be {{"type": "text", "text": "..."}}; other parts are not supported', name
            ) from None
    return "\n".join(texts)


def _misplaced(where: str, field: str, role: str) -> ApiError:
    return invalid(f"{where}.{field} is allowed only in a message of role {role}", f"{where}.{field}")
