"""One HTTP request in progress: what all APIs do alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from starlette.types import Scope

from engine.core.protocols import AnswerWriter
from engine.core.types import Request
from engine.server.http.generation import SLICE_SECONDS, EventStream, Generation
from engine.server.http.parsed_output import OutputFormat
from engine.server.http.request_timeout import enforce_deadline
from engine.server.http.responses import SendResponse, answer, stream
from engine.server.http.service import Service

MIN_PIECE = 2**16
"""Smaller pieces of a body are joined, bytes."""


class Turn:
    """Lets other tasks of the event loop run after each SLICE_SECONDS of work."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SLICE_SECONDS

    async def yield_if_over(self) -> None:
        """Let other tasks run if the time is over."""
        if time.monotonic() > self._end:
            await asyncio.sleep(0)
            self._end = time.monotonic() + SLICE_SECONDS


class Job:
    """Runs the engine requests of one HTTP request and sends the response, whole or streamed."""

    def __init__(
        self,
        service: Service,
        name: str,
        requests: Sequence[Request],
        writer: AnswerWriter,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
        choices_per_prompt: int = 1,
        output_format: OutputFormat | None = None,
        grammar_parameter: str | None = None,
    ) -> None:
        """name: id of the response. requests: one per prompt, in order. headers: further ones of the response.

        output_format: None if nothing is parsed. grammar_parameter: the parameter that asks for the requests' grammar,
        for refusals.
        """
        self._service = service
        self._name = name
        self._requests = requests
        self._writer = writer
        self._stream = stream
        self._headers = headers or {}
        self._choices_per_prompt = choices_per_prompt
        self._output_format = output_format
        self._grammar_parameter = grammar_parameter

    def response(self) -> SendResponse:
        """Sends the HTTP response; generation begins when the response is sent."""
        headers = {"x-request-id": self._name, **self._headers}
        if not self._stream:
            return answer(self._whole, headers)
        generation = self._generation()
        writer = self._writer
        build_events = partial(writer.events, usage=lambda: generation.usage)
        events = EventStream(generation, writer.templates(), build_events, writer.end)
        return stream(events, headers, end=writer.stream_end, error_event=writer.error_event)

    async def _whole(self, scope: Scope) -> list[bytes]:
        """The body of a response that is not streamed, in pieces."""
        turn = Turn()
        with self._generation() as generation, enforce_deadline(scope, generation):
            while generation.running:
                for delta in await generation.next():
                    for _ in self._writer.add(delta):
                        await turn.yield_if_over()
        pieces = [b""]
        for data in self._writer.body(generation.usage):
            if len(pieces[-1]) < MIN_PIECE:
                pieces[-1] += data
            else:
                pieces.append(data)
            await turn.yield_if_over()
        return pieces

    def _generation(self) -> Generation:
        service = self._service
        return Generation(
            service.client,
            service.tokenizer,
            self._requests,
            self._choices_per_prompt,
            self._output_format,
            self._grammar_parameter,
        )
