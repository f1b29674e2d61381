"""One HTTP request in progress: what all APIs do alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from engine.core.protocols import AnswerWriter
from engine.core.types import Request
from engine.server.front_end.request_trace import TRACE, GenerationTrace, RequestTrace
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
        operation: str = "chat",
    ) -> None:
        """name: id of the response. requests: one per prompt, in order. headers: further headers of the response.

        output_format: None if nothing is parsed. grammar_parameter: the parameter that asks for the requests' grammar,
        for refusals. operation: what is done, as traces name it.
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
        self._operation = operation

    def response(self) -> SendResponse:
        """The function that sends the HTTP response; generation begins when it is called."""
        headers = {"x-request-id": self._name, **self._headers}
        generation = self._generation()
        if self._stream:
            writer = self._writer
            build_events = partial(writer.events, usage=lambda: generation.usage)
            events = EventStream(generation, writer.templates(), build_events, writer.end, writer.reasoning_templates())
            send_response = stream(
                events,
                headers,
                end=writer.stream_end,
                error_event=writer.error_event,
                keep_alive=writer.keep_alive,
                keep_alive_interval=self._service.limits.stream_keep_alive,
            )
        else:
            send_response = answer(partial(self._whole, generation), headers)
        return self._traced(generation, send_response) if self._service.tracer is not None else send_response

    def _traced(self, generation: Generation, send_response: SendResponse) -> SendResponse:
        """As `send_response`, with the generation recorded in the request's trace."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            trace: RequestTrace | None = scope["state"].get(TRACE)
            if trace is not None:
                trace.generation = generation.trace = GenerationTrace.of(
                    self._operation,
                    self._service.name,
                    self._name,
                    self._requests,
                    self._choices_per_prompt,
                    self._stream,
                )
            await send_response(scope, receive, send)

        return traced

    async def _whole(self, generation: Generation, scope: Scope) -> list[bytes]:
        """The body of a response that is not streamed, in pieces."""
        turn = Turn()
        with generation, enforce_deadline(scope, generation):
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
