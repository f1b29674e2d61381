"""One completion or chat request in progress: what both APIs do alike."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.types import Scope

from engine.core.types import Request
from engine.server.http.generation import SLICE_SECONDS, Delta, EventStream, Generation, Templates, Usage
from engine.server.http.params import num_choices
from engine.server.http.parsed_output import OutputFormat
from engine.server.http.request_bodies import Body
from engine.server.http.request_timeout import enforce_deadline
from engine.server.http.responses import SendResponse, answer, sse_event, stream
from engine.server.http.service import Service
from engine.server.http.structured_output import parameter_of_grammar

MIN_PIECE = 2**16
"""Smaller pieces of a body are joined, bytes."""

BodyT = TypeVar("BodyT", bound=Body)


class Turn:
    """Lets other tasks of the event loop run after each SLICE_SECONDS of work."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SLICE_SECONDS

    async def yield_if_over(self) -> None:
        """Let other tasks run if the time is over."""
        if time.monotonic() > self._end:
            await asyncio.sleep(0)
            self._end = time.monotonic() + SLICE_SECONDS


class Job(ABC, Generic[BodyT]):
    """Runs the engine requests of one HTTP request and builds its response, whole or streamed."""

    object_name: ClassVar[str]
    """`object` of a whole response."""
    chunk_object_name: ClassVar[str]
    """`object` of each streamed chunk."""

    def __init__(
        self,
        service: Service,
        body: BodyT,
        name: str,
        requests: Sequence[Request],
        output_format: OutputFormat | None = None,
    ) -> None:
        """name: id of the response. requests: one per prompt, in order. output_format: None if nothing is parsed."""
        self._output_format = output_format
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
        self._continuous_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._streamed: Generation | None = None

    def response(self) -> SendResponse:
        """Sends the HTTP response; generation begins when the response is sent."""
        headers = {"x-request-id": self._name}
        if self.body.stream:
            self._streamed = self._generation()
            templates = None if self._continuous_usage else Templates(self._text_event)
            events = EventStream(self._streamed, templates, self._delta_events, self._usage_event)
            return stream(events, headers)
        return answer(self._whole, headers)

    @abstractmethod
    def _add(self, delta: Delta) -> Iterator[None]:
        """Collect a delta for `_choice_body`; yields after each few milliseconds of work."""

    @abstractmethod
    def _choice_body(self, choice: int) -> dict[str, Any]:
        """An element of `choices` of the whole response, from all collected deltas."""

    @abstractmethod
    def _text_event(self, choice: int, text: str) -> bytes:
        """The event of a chunk with nothing but text."""

    @abstractmethod
    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        """The events of any other delta; none when the delta holds nothing to send."""

    def _is_first(self, choice: int) -> bool:
        """Whether this is the first call for a choice."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """The event of one chunk; choice: the element of its `choices`."""
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        if self._continuous_usage and self._streamed is not None:
            usage = {"usage": self._streamed.usage.body()}
        return sse_event(self._head(self.chunk_object_name) | {"choices": [choice]} | usage)

    async def _whole(self, scope: Scope) -> list[bytes]:
        """The body of a response that is not streamed, in pieces."""
        turn = Turn()
        with self._generation() as generation, enforce_deadline(scope, generation):
            while generation.running:
                for delta in await generation.next():
                    for _ in self._add(delta):
                        await turn.yield_if_over()
        body = self._head(self.object_name) | {"choices": [], "usage": generation.usage.body()}
        before, name, after = msgspec.json.encode(body).rpartition(b'"choices":[')
        pieces = [before + name]
        for choice in range(self.num_choices):
            data = msgspec.json.encode(self._choice_body(choice))
            if choice:
                data = b"," + data
            if len(pieces[-1]) < MIN_PIECE:
                pieces[-1] += data
            else:
                pieces.append(data)
            await turn.yield_if_over()
        return [*pieces, after]

    def _usage_event(self, usage: Usage) -> bytes:
        """The last event of a stream; empty unless the client asked for the usage."""
        if not self._include_usage:
            return b""
        return sse_event(self._head(self.chunk_object_name) | {"choices": [], "usage": usage.body()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name, "object": kind, "created": self._created, "model": self.service.name}

    def _generation(self) -> Generation:
        return Generation(
            self.service.client,
            self.service.tokenizer,
            self.requests,
            self.choices_per_prompt,
            self._output_format,
            parameter_of_grammar(self.body),
        )
