"""The items of a response, made of a parser's events as they come."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, CustomInput, Event, Malformed, Reasoning
from engine.core.protocols import (
    breaks_call,
    broken_call,
    call_text,
    have_more_values,
    sse_event,
    template_arguments,
)
from engine.plugins.protocols.responses.input import encrypted
from engine.plugins.protocols.responses.tools import OfferedTool

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"
MAX_VALUES = 1024
"""Strings, lists and objects of arguments that are decoded to see whether they are one text."""

Emit = Callable[..., None]
"""Emits an event: its type, and its fields."""


def new_id(prefix: str) -> str:
    """A new id of an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Item(ABC):
    """One item of the output. Its events have its place, `output_index`."""

    def __init__(self, prefix: str, index: int, emit: Emit) -> None:
        self.id = new_id(prefix)
        self.status = IN_PROGRESS
        self._index = index
        self._emit_any = emit

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The item as it is now."""

    def begin(self) -> None:
        """Emit the events before the first text."""
        self._emit_any("output_item.added", output_index=self._index, item=self.body())

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add text."""

    def end(self, status: str) -> None:
        """Emit the events after the last text; status: that of the item."""
        self.status = status
        self._emit_any("output_item.done", output_index=self._index, item=self.body())

    def _emit(self, kind: str, **fields: Any) -> None:
        """Emit an event within the item."""
        self._emit_any(kind, output_index=self._index, item_id=self.id, **fields)


class TextItem(Item):
    """An item with one part of text: a message or reasoning."""

    text_events: str
    """Beginning of the types of the part's text events."""
    part_events = "content_part"
    """Beginning of the types of the part's own events."""
    position: Mapping[str, int] = {"content_index": 0}
    """Where the part is in the item, as its events say it."""
    with_logprobs = False

    def __init__(self, prefix: str, index: int, emit: Emit) -> None:
        super().__init__(prefix, index, emit)
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []
        """Elements of the part's list, encoded piece by piece, since a long list takes long."""
        self._has_part = False

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """The part as it is now."""

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self._texts)

    def begin(self) -> None:
        super().begin()
        self._has_part = True
        self._emit(f"{self.part_events}.added", **self.position, part=self._part())

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        self._texts.append(text)
        if logprobs:
            self._logprobs.append(msgspec.json.encode(logprobs)[1:-1])
        more = {"logprobs": logprobs} if self.with_logprobs else {}
        self._emit(f"{self.text_events}.delta", **self.position, delta=text, **more)

    def end(self, status: str) -> None:
        more = {"logprobs": self._all_logprobs()} if self.with_logprobs else {}
        self._emit(f"{self.text_events}.done", **self.position, text=self.text, **more)
        self._emit(f"{self.part_events}.done", **self.position, part=self._part())
        super().end(status)

    def _all_logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._logprobs) + b"]")


class Message(TextItem):
    """Content."""

    text_events = "output_text"
    with_logprobs = True

    def __init__(self, index: int, emit: Emit) -> None:
        super().__init__("msg", index, emit)

    def delta_event(self) -> bytes:
        """The event of more text without log probabilities, up to the sequence number."""
        kind = "response.output_text.delta"
        event = {"type": kind, "output_index": self._index, "item_id": self.id, "content_index": 0, "logprobs": []}
        return sse_event(event | {"sequence_number": 0}, kind).removesuffix(b"0}\n\n")

    def append(self, text: str) -> None:
        """Add text whose event is already built."""
        self._texts.append(text)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._all_logprobs()}

    def body(self) -> dict[str, Any]:
        content = [self._part()] if self._has_part else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}


class ReasoningItem(TextItem):
    """Reasoning."""

    text_events = "reasoning_text"

    def __init__(self, index: int, emit: Emit, *, with_encrypted: bool) -> None:
        super().__init__("rs", index, emit)
        self._with_encrypted = with_encrypted

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def body(self) -> dict[str, Any]:
        parts = [self._part()] if self._has_part else []
        found: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": self.status, **self._lists(parts)}
        if self._with_encrypted:
            found["encrypted_content"] = encrypted(self.text) if self.status != IN_PROGRESS else None
        return found

    def _lists(self, parts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """The lists of parts that the item has."""
        return {"summary": [], "content": parts}


class SummaryItem(ReasoningItem):
    """Reasoning that is sent as its own summary, for clients that show nothing else."""

    text_events = "reasoning_summary_text"
    part_events = "reasoning_summary_part"
    position: Mapping[str, int] = {"summary_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def _lists(self, parts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        return {"summary": parts}


class FunctionCall(Item):
    """A call of a function."""

    def __init__(self, index: int, emit: Emit, call_id: str, tool: OfferedTool) -> None:
        super().__init__("fc", index, emit)
        self._call_id = call_id
        self._tool = tool
        self._arguments: list[str] = []

    def body(self) -> dict[str, Any]:
        found = {"id": self.id, "type": "function_call", "status": self.status, "call_id": self._call_id}
        if self._tool.namespace is not None:
            found["namespace"] = self._tool.namespace
        return found | {"name": self._tool.name, "arguments": "".join(self._arguments)}

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        self._arguments.append(text)
        self._emit("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> None:
        more = {"name": self._tool.name, "arguments": "".join(self._arguments)}
        self._emit("function_call_arguments.done", **more)
        super().end(status)


class CustomCall(Item):
    """A call of a custom tool, which the model makes as a call of a function with the argument `input`."""

    def __init__(self, index: int, emit: Emit, call_id: str, tool: OfferedTool, function: str) -> None:
        """function: name of the function that the model sees."""
        super().__init__("ctc", index, emit)
        self.function = function
        self._call_id = call_id
        self._tool = tool
        self._arguments: list[str] = []
        self._input: list[str] = []
        self._reader = CustomInput()
        self.error = ""
        """What is wrong with the arguments of a complete call."""

    def body(self) -> dict[str, Any]:
        found = {"id": self.id, "type": "custom_tool_call", "status": self.status, "call_id": self._call_id}
        if self._tool.namespace is not None:
            found["namespace"] = self._tool.namespace
        return found | {"name": self._tool.name, "input": "".join(self._input)}

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        self._arguments.append(text)
        if said := self._reader.feed(text):
            self._input.append(said)
            self._emit("custom_tool_call_input.delta", delta=said)

    def end(self, status: str) -> None:
        if status == COMPLETED and self._read("".join(self._arguments)) != "".join(self._input):
            self.error = f"the model called custom tool {self._tool.name} with arguments other than the text `input`"
        if status == INCOMPLETE:  # clients run a tool when its item is done, whatever the status
            self.status = status
            return
        self._emit("custom_tool_call_input.done", input="".join(self._input))
        super().end(status)

    def as_text(self) -> str:
        """The call as text, if it is broken."""
        return call_text(self.function, "".join(self._arguments))

    @staticmethod
    def _read(arguments: str) -> str | None:
        """The input in complete arguments; None if they are others."""
        found = None if have_more_values([arguments], MAX_VALUES) else template_arguments(arguments)
        return next(iter(found.values())) if isinstance(found, dict) and len(found) == 1 else None


class Output:
    """All items. However the model's text is cut into events, the items are the same but for their ids."""

    def __init__(
        self,
        emit: Emit,
        new_call_id: Callable[[], str],
        offered: Callable[[str], OfferedTool],
        *,
        with_encrypted: bool,
        with_summary: bool,
    ) -> None:
        """emit: is called with each event of the stream. offered: returns the tool offered under a function's name.

        with_encrypted: whether reasoning has encrypted_content. with_summary: whether it comes as a summary.
        """
        self.items: list[Item] = []
        self.errors: list[str] = []
        """What could not be parsed."""
        self.streams = False
        """Whether events are sent as they are emitted."""
        self._emit = emit
        self._new_call_id = new_call_id
        self._offered = offered
        self._with_encrypted = with_encrypted
        self._reasoning_item = SummaryItem if with_summary else ReasoningItem
        self._open: Item | None = None

    def add(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add what an event says; logprobs: of content.

        Raises ApiError in a stream that has a part of a broken call of a custom tool.
        """
        if isinstance(event, Malformed):
            self.errors.append(event.reason)
        if isinstance(self._open, CustomCall) and breaks_call(event):
            self._break(self._open)
        match event:
            case Content():
                if not isinstance(self._open, Message):
                    self._begin(Message(len(self.items), self._emit))
                self._add(event.text, logprobs)
            case Reasoning():
                if not isinstance(self._open, ReasoningItem):
                    self._begin(self._reasoning_item(len(self.items), self._emit, with_encrypted=self._with_encrypted))
                self._add(event.text)
            case CallBegin():
                tool, index, call_id = self._offered(event.name), len(self.items), event.id or self._new_call_id()
                self._begin(
                    CustomCall(index, self._emit, call_id, tool, event.name)
                    if tool.custom
                    else FunctionCall(index, self._emit, call_id, tool)
                )
            case CallArguments():
                self._add(event.text)
            case CallEnd():
                self._close(COMPLETED)
            case Malformed():
                if isinstance(self._open, FunctionCall):
                    self._close(INCOMPLETE)

    def end(self, status: str) -> None:
        """End the output; status: that of an item which has not ended. Without any item, there is an empty message.

        Raises ApiError as `add` does.
        """
        if isinstance(self._open, CustomCall) and status != INCOMPLETE:
            self._break(self._open)
        if not self.items:
            self._begin(Message(0, self._emit))
        self._close(INCOMPLETE if self._in_call else status)

    def drop_open_call(self) -> None:
        """Leave out a call that has not ended: clients read the items of a response that failed, too."""
        if self._in_call:
            self.items.pop()
            self._open = None

    @property
    def open_message(self) -> Message | None:
        """The message that more content belongs to."""
        return self._open if isinstance(self._open, Message) else None

    @property
    def _in_call(self) -> bool:
        return isinstance(self._open, FunctionCall | CustomCall)

    def bodies(self) -> list[dict[str, Any]]:
        """The items as they are now."""
        return [item.body() for item in self.items]

    def _add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        assert self._open is not None
        self._open.add(text, logprobs)

    def _break(self, call: CustomCall) -> None:
        """Turn the open call into text, since clients would run its partial input."""
        if self.streams:
            raise broken_call(call.function, "; ".join(dict.fromkeys(self.errors)) or None)
        self.drop_open_call()
        self._begin(Message(len(self.items), self._emit))
        self._add(call.as_text())

    def _begin(self, item: Item) -> None:
        self._close(COMPLETED)
        self._open = item
        self.items.append(item)
        item.begin()

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.end(status)
            if isinstance(self._open, CustomCall) and self._open.error:
                self.errors.append(self._open.error)
        self._open = None
