"""Writes a response: whole, or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from engine.core.parsers import Content
from engine.core.protocols import AnswerWriter, ApiError, Delta, Usage, sse_event
from engine.core.types import FINISH_LENGTH, TokenLogprobs
from engine.plugins.protocols.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Message, Output
from engine.plugins.protocols.responses.tools import OfferedTool

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express; as at OpenAI."""

_json = msgspec.json.encode


@frozen(kw_only=True)
class Answer:
    """What a writer needs to know of its request."""

    name: str
    """Id of the response."""
    fields: Mapping[str, Any]
    """Fields of the response that follow from the request."""
    offered: Mapping[str, OfferedTool]
    """The tools by the name that the model sees."""
    new_call_id: Callable[[], str]
    token_bytes: Callable[[int], bytes]
    top_logprobs: int | None = None
    """Number of most likely tokens to report; None: no log probabilities."""
    with_encrypted: bool = False
    """Whether reasoning has encrypted_content."""
    with_summary: bool = False
    """Whether reasoning comes as a summary."""


class ResponseWriter(AnswerWriter):
    """Writes one response."""

    stream_end = b""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._created = int(time.time())
        self._sequence = 0
        self._begun = False
        self._data: list[bytes] = []
        """Events that are built and not yet sent."""
        self._text_event: tuple[Message, bytes] | None = None
        """A message, and the event of its text up to the sequence number."""
        self._finish_reason: str | None = None
        self._pending: list[TokenLogprobs] = []
        """Log probabilities of tokens whose text the parser holds back."""
        self._output = Output(
            self._emit,
            answer.new_call_id,
            lambda name: answer.offered.get(name, OfferedTool(name)),
            with_encrypted=answer.with_encrypted,
            with_summary=answer.with_summary,
        )

    def add(self, delta: Delta) -> Iterator[None]:
        for _ in self._feed(delta):
            yield

    def body(self, usage: Usage) -> Iterator[bytes]:
        yield _json(self._response(self._status, usage))

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        self._begin()
        for _ in self._feed(delta):
            yield self._take()
        if self._data:
            yield self._take()

    def end(self, usage: Usage) -> bytes:
        self._emit(self._status, response=self._response(self._status, usage))
        return self._take()

    def error_event(self, error: ApiError) -> bytes:
        self._begin()
        self._output.drop_open_call()
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        self._emit("failed", response=response)
        return self._take()

    def _begin(self) -> None:
        """Build the first events of a stream, once."""
        self._output.streams = True
        if not self._begun:
            self._begun = True
            response = self._response(IN_PROGRESS)
            self._emit("created", response=response)
            self._emit("in_progress", response=response)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish_reason == FINISH_LENGTH else COMPLETED

    def _feed(self, delta: Delta) -> Iterator[None]:
        """Add a delta to the output, an event at a time."""
        said = delta.said
        logprobs = self._of_content(delta)
        for index, event in enumerate(said):
            found = logprobs.get(index)
            if isinstance(event, Content) and found is None and self._add_text(event.text):
                yield
                continue
            self._output.add(event, () if found is None else self._logprobs(found))
            yield
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self._output.end(self._status)
            yield

    def _add_text(self, text: str) -> bool:
        """Add text to the open message by the fast path of streams; False: there is none, or no stream."""
        message = self._output.open_message
        if message is None or not self._output.streams:
            return False
        if self._text_event is None or self._text_event[0] is not message:
            self._text_event = (message, message.delta_event())
        message.append(text)
        before = self._text_event[1]
        self._data.append(b'%b%d,"delta":%b}\n\n' % (before, self._sequence, _json(text)))
        self._sequence += 1
        return True

    def _of_content(self, delta: Delta) -> dict[int, list[TokenLogprobs]]:
        """By index of an event with content, the log probabilities of the tokens whose text it has."""
        if self._answer.top_logprobs is None:
            return {}
        spans, said = delta.spans, delta.said
        if delta.events is None:
            spans = [(0, delta.logprobs)]
        found: dict[int, list[TokenLogprobs]] = {}
        for place, (begin, entries) in enumerate(spans):
            end = spans[place + 1][0] if place + 1 < len(spans) else len(said)
            self._pending += entries
            for index in range(begin, end):
                event = said[index]
                if isinstance(event, Content):
                    found[index] = self._taken(event.text)
            if begin < end and not isinstance(said[end - 1], Content):
                self._pending = []
        return found

    def _taken(self, text: str) -> list[TokenLogprobs]:
        """Take from the pending tokens those that have this text; before them are only marks of the format."""
        tokens = [self._answer.token_bytes(entry.token) for entry in self._pending]
        said = text.encode()
        begin = b"".join(tokens).rfind(said)
        if begin < 0:  # a character that the tokenizer wrote in another way
            begin, said = 0, b"".join(tokens)
        position = first = last = 0
        for index, token in enumerate(tokens):
            if position + len(token) <= begin:
                first = index + 1
            if position < begin + len(said):
                last = index + 1
            position += len(token)
        taken, self._pending = self._pending[first:last], self._pending[last:]
        return taken

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        def entry_json(token: int, logprob: float) -> dict[str, Any]:
            data = self._answer.token_bytes(token)
            return {
                "token": data.decode(errors="replace"),
                "logprob": max(logprob, MIN_LOGPROB),
                "bytes": list(data),
            }

        top = self._answer.top_logprobs or 0
        return [
            entry_json(entry.token, entry.logprob) | {"top_logprobs": [entry_json(*other) for other in entry.top[:top]]}
            for entry in entries
        ]

    def _emit(self, kind: str, **fields: Any) -> None:
        """Build an event; a no-op unless the response is streamed."""
        if self._output.streams:
            kind = f"response.{kind}"
            self._data.append(sse_event({"type": kind, "sequence_number": self._sequence, **fields}, kind))
            self._sequence += 1

    def _take(self) -> bytes:
        data, self._data = self._data, []
        return b"".join(data)

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        """The response as it is now."""
        ended = usage is not None
        errors = dict.fromkeys(self._output.errors)
        return {
            "id": self._answer.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended and status == COMPLETED else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            **self._answer.fields,
            "output": self._output.bodies(),
            "usage": None if usage is None else usage_body(usage),
        } | ({"parse_error": "; ".join(errors)} if errors else {})


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` of a response. Writing to the prefix cache is not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
