"""The input of a response as the messages of a chat template."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
from attrs import define

from engine.core.protocols import ApiError, excerpt
from engine.plugins.protocols.responses.tools import offered_name

CUSTOM_INPUT = "input"
"""The argument of the function that stands for a custom tool (engine.core.parsers.custom_parameters)."""
ITEMS_AT_A_TIME = 1000
"""Items that are read without a pause."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and their names in chat templates."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts, and the field that holds the text."""
ENCRYPTED = "engine-1:"
"""Beginning of the `encrypted_content` that this server writes: base64 of the reasoning follows, nothing is secret."""
NO_EFFECT = frozenset(
    ("id", "type", "status", "phase", "annotations", "logprobs", "parsed", "parsed_arguments", "created_by")
)
"""Fields of items and parts that come back from an earlier response, and that a prompt does not have."""

Message = dict[str, Any]


def encrypted(reasoning: str) -> str:
    """The `encrypted_content` of a reasoning item."""
    return ENCRYPTED + base64.b64encode(reasoning.encode()).decode()


async def template_messages(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[Message]:
    """The messages of an input. Raises ApiError for items that this server cannot read."""
    history = _History()
    if instructions:
        history.add_message("system", instructions)
    if isinstance(given, str):
        history.add_message("user", given)
        return history.finish()
    for index, item in enumerate(given):
        history.add(item, f"input[{index}]")
        if index % ITEMS_AT_A_TIME == ITEMS_AT_A_TIME - 1:
            await asyncio.sleep(0)
    return history.finish()


@define
class _Turn:
    """A message of the assistant: the reasoning, texts and calls that follow each other, in any order."""

    texts: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    calls: list[dict[str, Any]] = attrs.field(factory=list)
    ends_with_text: bool = False
    """Whether the last item was text. Further text starts a new line: the server never returns two texts in a row."""

    def add_text(self, text: str) -> None:
        """Add the text of a message."""
        self.texts += ["\n", text] if self.ends_with_text else [text]
        self.ends_with_text = True

    def add_reasoning(self, text: str) -> None:
        """Add the text of a reasoning item."""
        self.reasoning.append(text)
        self.ends_with_text = False

    def add_call(self, call: dict[str, Any]) -> None:
        """Add a call."""
        self.calls.append(call)
        self.ends_with_text = False

    def message(self) -> Message:
        """As chat templates expect it."""
        found: Message = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            found["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            found["tool_calls"] = self.calls
        return found


class _History:
    """The messages so far."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._system: list[str] = []
        """System messages at the beginning: they become one, since many templates take only one."""
        self._turn: _Turn | None = None
        """The assistant's message that ends the conversation so far."""
        self._names: dict[str, str] = {}
        """The functions that were called, by the id of the call."""
        self._readers: dict[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning_item,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._call_output,
            "custom_tool_call_output": self._call_output,
        }

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item of the input. where: its place, for errors."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference":
            raise _refused(f"{where} refers to an item that the server has not stored; send the item itself", where)
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise _refused(
                f"{where}.type is {excerpt(repr(kind))}; this server reads {', '.join(self._readers)}", f"{where}.type"
            )
        reader(item, where)

    def add_message(self, role: str, content: str) -> None:
        """Add a message."""
        if role == "system" and not self._messages and self._turn is None:
            self._system.append(content)
        elif role == "assistant":
            self._assistant().add_text(content)
        else:
            self._end_turn()
            self._messages.append({"role": role, "content": content})

    def finish(self) -> list[Message]:
        """All messages."""
        self._end_turn()
        if self._system:
            self._messages.insert(0, {"role": "system", "content": "\n\n".join(self._system)})
        return self._messages

    def _assistant(self) -> _Turn:
        """The assistant's message that goes on, or a new one."""
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _end_turn(self) -> None:
        """Add the assistant's message, which does not go on."""
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        _check_fields(item, where, "role", "content")
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise _refused(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
        self.add_message(ROLES[role], _text(item.get("content"), f"{where}.content"))

    def _reasoning_item(self, item: Mapping[str, Any], where: str) -> None:
        _check_fields(item, where, "summary", "content", "encrypted_content")
        text = _parts(item.get("content") or [], f"{where}.content", "reasoning_text")
        if not text and (given := item.get("encrypted_content")):
            text = _decrypted(given, f"{where}.encrypted_content")
        text = text or _parts(item.get("summary") or [], f"{where}.summary", "summary_text")
        if text:
            self._assistant().add_reasoning(text)

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        _check_fields(item, where, "call_id", "name", "arguments", "namespace")
        arguments = _string(item, "arguments", where)
        namespace = _string(item, "namespace", where) if item.get("namespace") is not None else None
        name = offered_name(_string(item, "name", where), namespace)
        self._add_call(_string(item, "call_id", where), name, arguments)

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        _check_fields(item, where, "call_id", "name", "input", "namespace")
        arguments = {CUSTOM_INPUT: _string(item, "input", where)}
        namespace = _string(item, "namespace", where) if item.get("namespace") is not None else None
        name = offered_name(_string(item, "name", where), namespace)
        self._add_call(_string(item, "call_id", where), name, arguments)

    def _add_call(self, call_id: str, name: str, arguments: Any) -> None:
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        self._assistant().add_call({"id": call_id, "type": "function", "function": function})

    def _call_output(self, item: Mapping[str, Any], where: str) -> None:
        _check_fields(item, where, "call_id", "output", "name", "namespace")
        call_id = _string(item, "call_id", where)
        self._end_turn()
        message: Message = {
            "role": "tool",
            "content": _text(item.get("output"), f"{where}.output"),
            "tool_call_id": call_id,
        }
        if (name := self._names.get(call_id)) is not None:
            message["name"] = name
        self._messages.append(message)


def _text(content: Any, where: str) -> str:
    """A text, or the texts of parts joined by newlines. Raises ApiError for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} must be a text or a list of parts", where, "invalid_type")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise _refused(
                f"{place} must be a part of type {', '.join(TEXT_PARTS)}; this server reads no images, files or audio",
                place,
            )
        _check_fields(part, place, TEXT_PARTS[kind])
        texts.append(_string(part, TEXT_PARTS[kind], place))
    return "\n".join(texts)


def _parts(given: Any, where: str, kind: str) -> str:
    """The texts of a reasoning item's parts, all of one type."""
    try:
        parts = msgspec.convert(given, list[dict[str, Any]])
        if all(part.get("type") == kind for part in parts):
            return "\n".join(msgspec.convert(part["text"], str) for part in parts)
    except (msgspec.ValidationError, KeyError):
        pass
    raise _refused(f'{where} must be a list of {{"type": "{kind}", "text": "..."}}', where)


def _decrypted(given: Any, where: str) -> str:
    """The reasoning in an `encrypted_content` of this server."""
    try:
        if isinstance(given, str) and given.startswith(ENCRYPTED):
            return base64.b64decode(given.removeprefix(ENCRYPTED), validate=True).decode()
    except ValueError:  # no base64, or no text in it
        pass
    raise _refused(f"{where} was not made by this server, which cannot read it; leave the item out", where)


def _string(item: Mapping[str, Any], field: str, where: str) -> str:
    found = item.get(field)
    if isinstance(found, str):
        return found
    name = f"{where}.{field}"
    if found is None:
        raise _refused(f"{name} is missing", name, "missing_required_parameter")
    raise _refused(f"{name} must be a text", name, "invalid_type")


def _check_fields(item: Mapping[str, Any], where: str, *known: str) -> None:
    """Raise ApiError for a field with a value that this server does not know."""
    for field, value in item.items():
        if field not in known and field not in NO_EFFECT and value is not None:
            name = f"{where}.{field}"
            raise _refused(f"{name} is not a parameter of this server; leave it out", name, "unknown_parameter")


def _refused(message: str, param: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)
