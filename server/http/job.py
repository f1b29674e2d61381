"""One completion or chat request in progress: what both APIs do alike."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from engine.core.types import Request
from engine.server.http.generation import Delta, EventStream, Generation, Templates, Usage
from engine.server.http.params import num_choices
from engine.server.http.request_bodies import Body
from engine.server.http.responses import SendResponse, answer, sse_event, stream
from engine.server.http.service import Service

BodyT = TypeVar("BodyT", bound=Body)


class Job(ABC, Generic[BodyT]):
    """Runs the engine requests of one HTTP request and builds its response, whole or streamed."""

    object_name: ClassVar[str]
    """`object` of a whole response."""
    chunk_object_name: ClassVar[str]
    """`object` of each streamed chunk."""

    def __init__(self, service: Service, body: BodyT, name: str, requests: Sequence[Request]) -> None:
        """name: id of the response. requests: one per prompt, in order."""
        self.service = service
        self.body = body
        self.requests = requests
        self.choices_per_prompt = num_choices(body, service.limits)
        self.num_choices = len(requests) * self.choices_per_prompt
        self._created = int(time.time())
        self._name = name
        self._begun: set[int] = set()
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)

    def response(self) -> SendResponse:
        """Sends the HTTP response; generation begins when the response is sent."""
        headers = {"x-request-id": self._name}
        if self.body.stream:
            events = EventStream(self._generation(), Templates(self._text_event), self._delta_events, self._usage_event)
            return stream(events, headers)
        return answer(self._whole, headers)

    @abstractmethod
    def _add(self, delta: Delta) -> None:
        """Collect a delta for `_choices`."""

    @abstractmethod
    def _choices(self) -> list[dict[str, Any]]:
        """`choices` of the whole response, from all collected deltas."""

    @abstractmethod
    def _text_event(self, choice: int, text: str) -> bytes:
        """The event of a chunk with nothing but text."""

    @abstractmethod
    def _delta_events(self, delta: Delta) -> bytes:
        """The events of any other delta; empty when the delta holds nothing to send."""

    def _is_first(self, choice: int) -> bool:
        """Whether this is the first call for a choice."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """The event of one chunk; choice: the element of its `choices`."""
        usage = {"usage": None} if self._include_usage else {}
        return sse_event(self._head(self.chunk_object_name) | {"choices": [choice]} | usage)

    async def _whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        with self._generation() as generation:
            while generation.running:
                for delta in await generation.next():
                    self._add(delta)
        return self._head(self.object_name) | {"choices": self._choices(), "usage": generation.usage.body()}

    def _usage_event(self, usage: Usage) -> bytes:
        """The last event of a stream; empty unless the client asked for the usage."""
        if not self._include_usage:
            return b""
        return sse_event(self._head(self.chunk_object_name) | {"choices": [], "usage": usage.body()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name, "object": kind, "created": self._created, "model": self.service.name}

    def _generation(self) -> Generation:
        return Generation(self.service.client, self.service.tokenizer, self.requests, self.choices_per_prompt)
