"""What /v1/completions and /v1/chat/completions write alike: `choices`, and chunks of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from engine.core.protocols import AnswerWriter, Delta, Template, Usage, sse_event
from engine.server.http.generation import Templates
from engine.server.http.request_bodies import StreamOptions


class ChoicesWriter(AnswerWriter):
    """Writes an answer of one or more choices."""

    object_name: ClassVar[str]
    """`object` of a whole response."""
    chunk_object_name: ClassVar[str]
    """`object` of each streamed chunk."""

    def __init__(self, name: str, model: str, num_choices: int, options: StreamOptions | None) -> None:
        """name: id of the response."""
        self.num_choices = num_choices
        self._name = name
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._usage: Callable[[], Usage] | None = None

    @abstractmethod
    def _choice_body(self, choice: int) -> dict[str, Any]:
        """An element of `choices` of the whole response, from all collected deltas."""

    @abstractmethod
    def _text_event(self, choice: int, text: str) -> bytes:
        """The event of a chunk with nothing but text."""

    @abstractmethod
    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        """The events of any other delta; none when the delta holds nothing to send."""

    def body(self, usage: Usage) -> Iterator[bytes]:
        body = self._head(self.object_name) | {"choices": [], "usage": usage.body()}
        before, name, after = msgspec.json.encode(body).rpartition(b'"choices":[')
        yield before + name
        for choice in range(self.num_choices):
            data = msgspec.json.encode(self._choice_body(choice))
            yield b"," + data if choice else data
        yield after

    def templates(self) -> Mapping[int, Template] | None:
        return None if self._continuous_usage else Templates(self._text_event)

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        self._usage = usage
        return self._delta_events(delta)

    def end(self, usage: Usage) -> bytes:
        """The chunk with the usage; empty unless the client asked for the usage."""
        if not self._include_usage:
            return b""
        return sse_event(self._head(self.chunk_object_name) | {"choices": [], "usage": usage.body()})

    def _is_first(self, choice: int) -> bool:
        """Whether this is the first call for a choice."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """The event of one chunk; choice: the element of its `choices`."""
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        if self._continuous_usage and self._usage is not None:
            usage = {"usage": self._usage().body()}
        return sse_event(self._head(self.chunk_object_name) | {"choices": [choice]} | usage)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name, "object": kind, "created": self._created, "model": self._model}
