"""The content blocks of an answer: made of a parser's events, as the events of a stream or collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from attrs import define, field

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Reasoning
from engine.core.protocols import breaks_call, call_text, completing
from engine.plugins.protocols.anthropic import signature

BlockEvent = Mapping[str, Any]
"""One of content_block_start, content_block_delta and content_block_stop, as in a stream."""

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
ID_PREFIX = "toolu_"
"""Precedes the id of a call, as the model's format has it, in the id of a tool_use block."""


class BlockSequence:
    """Turns a parser's events into events of content blocks.

    Blocks follow one another: each has a start, any number of deltas and a stop before the next one starts, and indexes
    count from 0. With their deltas joined, the blocks do not depend on how the parser cuts texts into events.
    """

    def __init__(self, new_call_id: Callable[[], str], *, show_thinking: bool = True) -> None:
        """new_call_id: makes an id for a call to which the model has given none, in the model's format.
        show_thinking: False: thinking blocks have no text.
        """
        self._new_call_id = new_call_id
        self._show_thinking = show_thinking
        self._open: str | None = None
        """Type of the open block."""
        self.index = -1
        """Index of the block that started last."""
        self._hidden: list[str] = []
        """Text of the open thinking block, if it is not shown."""
        self.has_complete_call = False
        self.open_call: str | None = None
        """Name of the call that began last, if it is not complete."""
        self.broken_call: str | None = None
        """Name of a call that can no longer be completed, other than by the end of the output."""
        self._errors: list[str] = []

    @property
    def error(self) -> str | None:
        """What was wrong with text that could not be parsed; None: nothing."""
        return "; ".join(dict.fromkeys(self._errors)) or None

    def feed(self, event: Event) -> Iterator[BlockEvent]:
        """The block events of the parser's next event."""
        if self.open_call is not None and breaks_call(event):
            self.broken_call = self.open_call
        match event:
            case Reasoning() if event.text:
                yield from self.begin_thinking()
                if self._show_thinking:
                    yield self.thinking_delta(event.text)
                else:
                    self._hidden.append(event.text)
            case Content() if event.text:
                yield from self.begin_text()
                yield self.text_delta(event.text)
            case CallBegin():
                yield from self.end()
                self.open_call = event.name
                call_id = ID_PREFIX + (event.id or self._new_call_id())
                yield from self._open_block(TOOL_USE, {"id": call_id, "name": event.name, "input": {}})
            case CallArguments() if event.text:
                yield self._delta("input_json_delta", "partial_json", event.text)
            case CallEnd():
                self.has_complete_call, self.open_call = True, None
                yield from self.end()
            case Malformed():
                self._errors.append(event.reason)

    def begin_text(self) -> list[BlockEvent]:
        """The events that must come before more text of an answer; none if its block is open."""
        return list(self._open_block(TEXT, {"text": ""}))

    def text_delta(self, text: str) -> BlockEvent:
        """The event of more text, whose block is open."""
        return self._delta("text_delta", "text", text)

    def begin_thinking(self) -> list[BlockEvent]:
        """The events that must come before more thinking; none if its block is open."""
        return list(self._open_block(THINKING, {"thinking": "", "signature": ""}))

    def thinking_delta(self, text: str) -> BlockEvent:
        """The event of more thinking, whose block is open."""
        return self._delta("thinking_delta", "thinking", text)

    def end(self) -> Iterator[BlockEvent]:
        """The events that close the open block, if there is one."""
        if self._open is None:
            return
        if self._open == THINKING:
            hidden, self._hidden = "".join(self._hidden), []
            yield self._delta("signature_delta", "signature", signature.carrying(hidden) if hidden else signature.SHOWN)
        self._open = None
        yield {"type": "content_block_stop", "index": self.index}

    def _open_block(self, kind: str, fields: Mapping[str, Any]) -> Iterator[BlockEvent]:
        if self._open == kind:
            return
        yield from self.end()
        self._open = kind
        self.index += 1
        yield {"type": "content_block_start", "index": self.index, "content_block": {"type": kind, **fields}}

    def _delta(self, kind: str, name: str, text: str) -> BlockEvent:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text}}


@define
class _Collected:
    """A block and the texts of its deltas, by field."""

    start: Mapping[str, Any]
    texts: dict[str, list[str]] = field(factory=dict)
    is_whole_call: bool = False
    """Whether it is a call whose arguments are known to be a JSON object."""


class CollectedBlocks:
    """The blocks of an answer that is not streamed."""

    def __init__(self) -> None:
        self._blocks: list[_Collected] = []

    def add(self, event: BlockEvent) -> None:
        """Add an event of a block."""
        if event["type"] == "content_block_start":
            self._blocks.append(_Collected(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            [name] = delta.keys() - {"type"}
            self._blocks[event["index"]].texts.setdefault(name, []).append(delta[name])

    def end_call(self) -> None:
        """Note that the call of the last block is complete."""
        self._blocks[-1].is_whole_call = True

    def content(self, *, cut: bool) -> Iterator[dict[str, Any] | None]:
        """The elements of a message's `content`, one at a time, and None amid work on a long one.

        cut: whether the output was cut short within its last call, if that is not complete. A call cut short keeps its
        complete arguments; any other incomplete call becomes text, so that no client runs it.
        """
        for block in self._blocks:
            texts = {name: "".join(parts) for name, parts in block.texts.items()}
            if block.start["type"] != TOOL_USE:
                yield {**block.start, **texts}
                continue
            arguments = texts.get("partial_json", "")
            if not (block.is_whole_call or cut):
                yield {"type": TEXT, "text": call_text(block.start["name"], arguments)}
                continue
            if not block.is_whole_call:
                arguments = yield from completing(arguments)
            yield {**block.start, "input": msgspec.Raw(arguments.encode())}
