"""The contract of what writes an answer: an API's JSON for the outputs of the engine, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import msgspec

from engine.server.front_end.errors import ApiError
from engine.server.http.generation import Delta, Template, Usage

DONE = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's older APIs."""


class AnswerWriter(ABC):
    """Writes the answer to one HTTP request in the form of its API.

    Of a whole answer, `add` collects each delta, and `body` is called at the end. Of a stream, `events` is called with
    each delta and `end` after the last one. A writer is used for one request. Its methods run in the event loop: those
    that return iterators yield after each few milliseconds of work at most, so that other streams get their turns.
    """

    stream_end: bytes = DONE
    """Bytes after the last event of a stream that did not fail."""

    @abstractmethod
    def add(self, delta: Delta) -> Iterator[None]:
        """Collect a delta for `body`."""

    @abstractmethod
    def body(self, usage: Usage) -> Iterator[bytes]:
        """The JSON of the whole answer, in pieces, from all collected deltas."""

    @abstractmethod
    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        """The events of a delta; none when the delta holds nothing to send. usage: returns the counts so far."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The events after all choices have finished; may be empty."""

    def templates(self) -> Mapping[int, Template] | None:
        """The event of each choice for further content and nothing else; None: `events` builds these too."""
        return None

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that failed after its first event; nothing follows."""
        return error_event(error)


def error_event(error: ApiError) -> bytes:
    """The event that reports `error` in OpenAI's shape."""
    return sse_event(error.body())


def sse_event(body: object) -> bytes:
    """Encode one server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
