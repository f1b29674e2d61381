"""The message of a choice, made of a parser's events: whole, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Reasoning
from engine.core.types import FINISH_STOP

FINISH_TOOL_CALLS = "tool_calls"


@define
class _Call:
    """A tool call."""

    id: str
    name: str
    arguments: list[str] = field(factory=list)

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }


class ChatMessage:
    """An assistant's message as its events come."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        """new_call_id: makes an id for a call to which the model has given none."""
        self._new_call_id = new_call_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._num_calls = 0
        self._complete = False
        self._errors: list[str] = []

    @property
    def error(self) -> dict[str, str]:
        """The field `parse_error` of the choice; nothing if all of the output could be parsed."""
        return {"parse_error": "; ".join(dict.fromkeys(self._errors))} if self._errors else {}

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's finish reason as the API's: tool_calls where the output ended with a complete call."""
        return FINISH_TOOL_CALLS if reason == FINISH_STOP and self._complete else reason

    def add(self, event: Event) -> None:
        """Collect an event for `body`."""
        match event:
            case Content():
                self._content.append(event.text)
            case Reasoning():
                self._reasoning.append(event.text)
            case CallArguments():
                self._calls[-1].arguments.append(event.text)
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
                call = self._begin(event)
                return {"tool_calls": [{"index": self._num_calls - 1, **call.body()}]}
            case CallArguments():
                return {"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": event.text}}]}
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
        return _Call(event.id or self._new_call_id(), event.name)

    def _note(self, event: Event) -> None:
        if isinstance(event, CallEnd):
            self._complete = True
        elif isinstance(event, Malformed):
            self._errors.append(event.reason)
