"""Writes an answer as Anthropic's message, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from engine.core.parsers import CallEnd
from engine.core.protocols import AnswerWriter, ApiError, Delta, Template, Usage, broken_call, sse_event
from engine.core.types import FINISH_LENGTH
from engine.plugins.protocols.anthropic.blocks import BlockEvent, BlockSequence, CollectedBlocks
from engine.plugins.protocols.anthropic.errors import error_body

PING = sse_event({"type": "ping"}, "ping")
"""Keeps a stream alive."""
PING_SECONDS = 10.0
"""Seconds after which a stream that has nothing to send, because its reasoning is omitted, sends a ping."""


class MessageWriter(AnswerWriter):
    """Writes one message."""

    stream_end = b""
    keep_alive = PING

    def __init__(
        self,
        name: str,
        model: str,
        new_call_id: Callable[[], str],
        *,
        max_tokens: int,
        show_thinking: bool = True,
        fields: Mapping[str, Any] = {},
    ) -> None:
        """name: id of the message. new_call_id, show_thinking: see BlockSequence. max_tokens: as the client gave it.
        fields: further fields of the message.
        """
        self._name = name
        self._model = model
        self._max_tokens = max_tokens
        self._fields = fields
        self._show_thinking = show_thinking
        self._blocks = BlockSequence(new_call_id, show_thinking=show_thinking)
        self._collected = CollectedBlocks()
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._begun = False
        self._sent = 0.0
        """When the last event of a stream was built, time.monotonic()."""

    def add(self, delta: Delta) -> Iterator[None]:
        for event in delta.said:
            for part in self._blocks.feed(event):
                self._collected.add(part)
            if isinstance(event, CallEnd):
                self._collected.end_call()
            yield
        self._note(delta)

    def body(self, usage: Usage) -> Iterator[bytes]:
        for part in self._blocks.end():
            self._collected.add(part)
        message = self._message(usage) | self._ending(usage)
        before, name, after = msgspec.json.encode(message).rpartition(b'"content":[')
        yield before + name
        separator = b""
        for block in self._collected.content(cut=self._cut_short and self._blocks.broken_call is None):
            if block is None:
                yield b""
                continue
            yield separator + msgspec.json.encode(block)
            separator = b","
        yield after

    def templates(self) -> Mapping[int, Template]:
        return _BlockTemplates(self._blocks, self._blocks.begin_text, self._blocks.text_delta)

    def reasoning_templates(self) -> Mapping[int, Template] | None:
        if not self._show_thinking:
            return None
        return _BlockTemplates(self._blocks, self._blocks.begin_thinking, self._blocks.thinking_delta)

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        now = time.monotonic()
        if not self._begun:
            self._begun = True
            yield _event({"type": "message_start", "message": self._message(usage())})
            self._sent = now
        for event in delta.said:
            for part in self._blocks.feed(event):
                yield _event(part)
                self._sent = now
            if self._blocks.broken_call is not None:
                raise broken_call(self._blocks.broken_call, self._blocks.error)
        self._note(delta)
        if delta.finish_reason is not None:
            if self._blocks.open_call is not None and not self._cut_short:
                raise broken_call(self._blocks.open_call, self._blocks.error)
            yield from map(_event, self._blocks.end())
        elif now - self._sent > PING_SECONDS:
            yield PING
            self._sent = now

    def end(self, usage: Usage) -> bytes:
        return _event({"type": "message_delta", "delta": self._ending(usage), "usage": _usage(usage)}) + _event(
            {"type": "message_stop"}
        )

    def error_event(self, error: ApiError) -> bytes:
        return _event(error_body(error))

    def _note(self, delta: Delta) -> None:
        """Remember how the answer ended."""
        self._finish_reason, self._stop_sequence = delta.finish_reason, delta.stop_string

    @property
    def _cut_short(self) -> bool:
        """Whether a limit or a stop string ended the answer."""
        return self._finish_reason == FINISH_LENGTH or self._stop_sequence is not None

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
            **self._fields,
            "content": [],
        }

    def _ending(self, usage: Usage) -> dict[str, Any]:
        """Why the answer ended, and what was wrong with what could not be parsed."""
        ending: dict[str, Any] = {"stop_reason": self._stop_reason(usage), "stop_sequence": self._stop_sequence}
        return ending if self._blocks.error is None else ending | {"parse_error": self._blocks.error}

    def _stop_reason(self, usage: Usage) -> str:
        if self._finish_reason == FINISH_LENGTH:
            full = usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.has_complete_call else "end_turn"


class _BlockTemplates(dict[int, Template]):
    """The template of further text of one type of block, made when there is some: the text may begin a block."""

    def __init__(
        self, blocks: BlockSequence, begin: Callable[[], list[BlockEvent]], delta: Callable[[str], BlockEvent]
    ) -> None:
        """begin: returns the events before more text, none if its block is open. delta: makes the event of a text."""
        super().__init__()
        self._blocks = blocks
        self._begin = begin
        self._delta = delta
        self._block = -1
        """Index of the block that `_template` is for."""
        self._template = Template(b"", b"")

    def __getitem__(self, choice: int) -> Template:
        opening = self._begin()
        if self._block != self._blocks.index:
            self._block = self._blocks.index
            self._template = Template.of(lambda text: _event(self._delta(text)))
        if not opening:
            return self._template
        return Template(b"".join(map(_event, opening)) + self._template.before, self._template.after)


def _usage(usage: Usage) -> dict[str, Any]:
    """`usage`: tokens of the prompt that were in the prefix cache are not part of input_tokens."""
    details: dict[str, Any] = {}
    if usage.reasoning_tokens is not None:
        details["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **details,
    }


def _event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event, named by the type of its body."""
    return sse_event(body, body["type"])
