"""Responses that are cancelled when the client disconnects: JSON, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.protocols import DONE, KEEP_ALIVE, error_event
from engine.server.front_end.connections import Connection
from engine.server.front_end.errors import ApiError, identify
from engine.server.front_end.request_trace import TRACE, RequestTrace
from engine.server.http.errors import error_response, record_error
from engine.server.http.generation import EventStream
from engine.server.http.request_timeout import enforce_deadline

log = logging.getLogger(__name__)

SendResponse = Callable[[Scope, Receive, Send], Awaitable[None]]

SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class CancellableResponse(Response):
    """Runs `send_response`, which sends the whole response, and cancels it when the client disconnects."""

    def __init__(self, send_response: SendResponse) -> None:
        super().__init__()
        self._send_response = send_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; returns early if the client disconnects."""
        work = asyncio.ensure_future(self._send_response(scope, receive, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled():
            work.result()


def prepared(prepare: Callable[[], Awaitable[SendResponse]]) -> CancellableResponse:
    """A response that is made by `prepare`, which is cancelled as well when the client disconnects."""

    async def send_response(scope: Scope, receive: Receive, send: Send) -> None:
        trace: RequestTrace | None = scope["state"].get(TRACE)
        if trace is not None:
            trace.preparing = time.monotonic()
        respond = await prepare()
        await respond(scope, receive, send)

    return CancellableResponse(send_response)


def answer(body: Callable[[Scope], Awaitable[Sequence[bytes]]], headers: Mapping[str, str]) -> SendResponse:
    """A function that sends a JSON response: the pieces that `body` returns, or the ApiError that it raises."""

    async def send_response(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = await body(scope)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        length = str(sum(map(len, pieces)))
        whole = {"content-type": "application/json", "content-length": length, **headers}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(whole)})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    return send_response


def stream(
    events: EventStream,
    headers: Mapping[str, str],
    *,
    end: bytes = DONE,
    error_event: Callable[[ApiError], bytes] = error_event,
    keep_alive: bytes = KEEP_ALIVE,
    keep_alive_interval: float = 0.0,
) -> SendResponse:
    """A function that sends server-sent events, and `end` after the last one.

    While no event comes, `keep_alive` is sent every `keep_alive_interval` seconds; 0: never. An ApiError before
    anything is sent becomes a plain error response; a later one becomes the last event, which `error_event` builds.
    """

    async def send_response(scope: Scope, receive: Receive, send: Send) -> None:
        writer = _EventWriter(events, scope["state"]["connection"], keep_alive, keep_alive_interval)
        raw = _raw({**SSE_HEADERS, **headers})
        last = end
        started = False
        try:
            with events.generation, enforce_deadline(scope, events.generation):
                await writer.first()
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                started = True
                await writer.rest()
        except ApiError as error:
            if not started:
                await error_response(error, scope)(scope, receive, send)
                return
            record_error(error, scope)
            last = _built(error_event, error, scope)
        except Exception:
            if not started:
                raise
            log.exception("a stream failed")
            failure = ApiError(500, "internal server error; see the server's log")
            record_error(failure, scope)
            last = _built(error_event, failure, scope)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    return send_response


def _built(build: Callable[[ApiError], bytes], error: ApiError, scope: Scope) -> bytes:
    """The event that reports `error` of a request; in OpenAI's shape if a protocol's own cannot be built."""
    identify(error, scope["state"])
    try:
        return build(error)
    except Exception:
        log.exception("the last event of a stream could not be built")
        return error_event(error)


class _EventWriter:
    """Writes the events of a stream to its connection as outputs come.

    Waking a stream's task would be most of the cost of an event. So the task only waits for the end of the stream, and
    events are built and written in the call that delivers the outputs. While the client does not read, no events are
    built.
    """

    def __init__(self, events: EventStream, connection: Connection, keep_alive: bytes, interval: float) -> None:
        """keep_alive: what is written after `interval` seconds without an event; 0: never."""
        self._generation = events.generation
        self._connection = connection
        self._take = events.take
        self._write = connection.write_chunk
        self._write_later = events.generation.write_later
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[bytes] = loop.create_future()
        self._finished: asyncio.Future[None] = loop.create_future()
        self._open = False
        self._ended = False
        """Whether the last events are built."""
        self._keep_alive = keep_alive
        self._interval = interval
        self._paused = True
        """Whether nothing has been written since the last call of `_on_interval`."""
        self._timer: asyncio.TimerHandle | None = None
        """The next call of `_on_interval`."""

    async def first(self) -> None:
        """Wait for the first event, no longer than for the interval; raises the error of building it."""
        self._generation.listen(self._on_outputs)
        both = (self._first, self._finished)
        await asyncio.wait(both, timeout=self._interval or None, return_when=asyncio.FIRST_COMPLETED)
        if self._finished.done():
            self._finished.result()

    async def rest(self) -> None:
        """Write all events; raises the error of building one."""
        self._open = True
        self._connection.when_writable(self._on_outputs)
        try:
            if self._first.done():
                self._schedule_write(self._first.result())
            if self._interval:
                self._paused = not self._first.done()
                self._on_interval()
            if not self._generation.finished:  # later, so that the first events are written before a failure ends all
                asyncio.get_running_loop().call_soon(self._on_outputs)
            await self._finished
        finally:
            self._connection.when_writable(None)
            if self._timer is not None:
                self._timer.cancel()
            self._write = self._connection.write_chunk  # a method of this object would keep it alive

    def _on_interval(self) -> None:
        """Keep the connection alive if nothing has been written for an interval.

        Only the first write after each call notes that events flow, so that the others cost nothing more.
        """
        if self._paused and not self._connection.full:
            self._connection.write_chunk(self._keep_alive)
        self._paused = True
        self._write = self._write_and_note
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._on_interval)

    def _write_and_note(self, data: bytes) -> None:
        self._paused = False
        self._write = self._connection.write_chunk
        self._write(data)

    def _on_outputs(self) -> None:
        """Build and write the events of new outputs."""
        if (self._connection.full if self._open else self._first.done()) or self._finished.done() or self._ended:
            return
        try:
            data = self._take()
        except Exception as error:
            self._finished.set_exception(error)
            return
        if self._generation.behind:
            asyncio.get_running_loop().call_soon(self._on_outputs)
        if not self._open:
            if data or self._generation.finished:
                self._first.set_result(data)
            return
        if data or self._generation.finished:
            self._schedule_write(data)

    def _schedule_write(self, data: bytes) -> None:
        self._ended = self._generation.finished
        self._write_later(self._write_last if self._generation.finished else self._write, data)

    def _write_last(self, data: bytes) -> None:
        """Write the last events; the stream ends when they are written, not when they are built."""
        if data:
            self._write(data)
        if not self._finished.done():  # else the client has left since the events were built
            self._finished.set_result(None)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _disconnected(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
