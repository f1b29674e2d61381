"""The message of a choice, made of a parser's events: whole, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from engine.core.parsers import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    CustomInput,
    Event,
    Malformed,
    Reasoning,
)
from engine.core.types import FINISH_STOP

FINISH_TOOL_CALLS = "tool_calls"


@define
class _Call:
    """A tool call."""

    id: str
    name: str
    arguments: list[str] = field(factory=list)
    input: CustomInput | None = None
    """Reads the input of a custom tool."""

    def body(self) -> dict[str, Any]:
        """The call in the JSON of a message, with the arguments so far."""
        if self.input is not None:
            return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": "".join(self.arguments)}}
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }

    def piece(self, arguments: str) -> tuple[str, dict[str, Any]]:
        """Read a further piece of the arguments; return the text that it adds, and the delta with this text."""
        if self.input is None:
            return arguments, {"function": {"arguments": arguments}}
        text = self.input.feed(arguments)
        return text, {"custom": {"input": text}}


class ChatMessage:
    """An assistant's message as its events come."""

    def __init__(
        self, new_call_id: Callable[[], str], *, named_call: bool = False, custom: frozenset[str] = frozenset()
    ) -> None:
        """new_call_id: makes an id for a call to which the model has given none. named_call: whether the client named
        the function that is called. custom: names of custom tools.
        """
        self._named_call = named_call
        self._custom = custom
        self._new_call_id = new_call_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._open: _Call | None = None
        """The call of a stream that began last."""
        self._num_calls = 0
        self._complete = False
        self._errors: list[str] = []

    @property
    def error(self) -> dict[str, str]:
        """The field `parse_error` of the choice; nothing if all of the output could be parsed."""
        return {"parse_error": "; ".join(dict.fromkeys(self._errors))} if self._errors else {}

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's finish reason as the API's: tool_calls where the model decided for a call, and completed it."""
        return FINISH_TOOL_CALLS if reason == FINISH_STOP and self._complete and not self._named_call else reason

    def add(self, event: Event) -> None:
        """Collect an event for `body`."""
        match event:
            case Content():
                self._content.append(event.text)
            case Reasoning():
                self._reasoning.append(event.text)
            case CallArguments():
                self._calls[-1].arguments.append(self._calls[-1].piece(event.text)[0])
            case CallBegin():
                self._calls.append(self._begin(event))
            case _:
                self._note(event)

    def delta(self, event: Event) -> dict[str, Any] | None:
        """The `delta` of an event in a stream, which is not collected; None if it has none."""
        match event:
            case Content():
                return {"content": event.text}
            case Reasoning():
                return {"reasoning_content": event.text}
            case CallBegin():
                self._open = self._begin(event)
                return {"tool_calls": [{"index": self._num_calls - 1, **self._open.body()}]}
            case CallArguments():
                assert self._open is not None
                text, piece = self._open.piece(event.text)
                return {"tool_calls": [{"index": self._num_calls - 1, **piece}]} if text else None
            case _:
                self._note(event)
                return None

    def body(self) -> dict[str, Any]:
        """The `message` of a whole response. `content` is null if there is only something else."""
        content = "".join(self._content)
        others: dict[str, Any] = {}
        if self._reasoning:
            others["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            others["tool_calls"] = [call.body() for call in self._calls]
        return {"role": "assistant", "content": content if content or not others else None, "refusal": None} | others

    def _begin(self, event: CallBegin) -> _Call:
        self._num_calls += 1
        custom = CustomInput() if event.name in self._custom else None
        return _Call(event.id or self._new_call_id(), event.name, input=custom)

    def _note(self, event: Event) -> None:
        if isinstance(event, CallEnd):
            self._complete = True
        elif isinstance(event, Malformed):
            self._errors.append(event.reason)
