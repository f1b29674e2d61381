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
from engine.core.protocols import breaks_call, broken_call, call_text
from engine.core.types import FINISH_LENGTH, FINISH_STOP

FINISH_TOOL_CALLS = "tool_calls"


@define
class _Call:
    """A tool call."""

    id: str
    name: str
    reader: CustomInput | None = None
    """Reads the input of a custom tool."""
    arguments: list[str] = field(factory=list)
    """As the model wrote them."""
    input: list[str] = field(factory=list)
    """Of a custom tool."""

    def body(self) -> dict[str, Any]:
        """The call in the JSON of a message, with the arguments so far."""
        if self.reader is not None:
            return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": "".join(self.input)}}
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }

    def add(self, arguments: str) -> None:
        """Collect a further piece of the arguments."""
        self.arguments.append(arguments)
        if self.reader is not None:
            self.input.append(self.reader.feed(arguments))

    def delta(self, arguments: str) -> dict[str, Any] | None:
        """The delta of a further piece of the arguments, which is not collected; None if it adds no text."""
        if self.reader is None:
            return {"function": {"arguments": arguments}} if arguments else None
        text = self.reader.feed(arguments)
        return {"custom": {"input": text}} if text else None


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
        """The call that began last, if it is not complete."""
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
        self._note(event, streamed=False)
        match event:
            case Content():
                self._content.append(event.text)
            case Reasoning():
                self._reasoning.append(event.text)
            case CallArguments():
                assert self._open is not None
                self._open.add(event.text)
            case CallBegin():
                self._calls.append(self._begin(event))

    def delta(self, event: Event) -> dict[str, Any] | None:
        """The `delta` of an event in a stream, which is not collected; None if it has none.

        Raises ApiError if the stream has a part of a broken call of a custom tool.
        """
        self._note(event, streamed=True)
        match event:
            case Content():
                return {"content": event.text}
            case Reasoning():
                return {"reasoning_content": event.text}
            case CallBegin():
                call = self._begin(event)
                return {"tool_calls": [{"index": self._num_calls - 1, **call.body()}]}
            case CallArguments():
                assert self._open is not None
                piece = self._open.delta(event.text)
                return None if piece is None else {"tool_calls": [{"index": self._num_calls - 1, **piece}]}
            case _:
                return None

    def end(self, reason: str, *, streamed: bool, stop_string: str | None = None) -> None:
        """End the message; reason: the engine's finish reason. stop_string: which ended it.

        Raises ApiError as `delta` does.
        """
        if reason != FINISH_LENGTH and self._open_custom is not None:
            self._break(self._open_custom, streamed=streamed, stop_string=stop_string)

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
        self._open = _Call(event.id or self._new_call_id(), event.name, custom)
        return self._open

    def _note(self, event: Event, *, streamed: bool) -> None:
        """Note what an event says of the call that began last."""
        if isinstance(event, Malformed):
            self._errors.append(event.reason)
        if self._open_custom is not None and breaks_call(event):
            self._break(self._open_custom, streamed=streamed)
        if isinstance(event, CallEnd):
            self._complete, self._open = True, None

    @property
    def _open_custom(self) -> _Call | None:
        """The call that began last, if it is one of a custom tool and not complete."""
        return self._open if self._open is not None and self._open.reader is not None else None

    def _break(self, call: _Call, *, streamed: bool, stop_string: str | None = None) -> None:
        """Turn the open call into content, since clients would run its partial input."""
        if streamed:
            raise broken_call(call.name, self.error.get("parse_error"), stop_string=stop_string)
        self._open = None
        self._calls.pop()
        self._content.append(call_text(call.name, "".join(call.arguments)))
