"""Responses that are computed while the client is watched: when it goes away, the work is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.front_end.connections import Connection
from engine.server.front_end.errors import ApiError
from engine.server.http.errors import error_response, json_response
from engine.server.http.generation import EventStream

log = logging.getLogger(__name__)

Work = Callable[[Scope, Receive, Send], Awaitable[None]]

SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
DONE = b"data: [DONE]\n\n"


class Answer(Response):
    """Runs `work`, which sends the whole response."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop because the client has gone."""
        work = asyncio.ensure_future(self._work(scope, receive, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled():
            work.result()


def answer(body: Callable[[], Awaitable[Any]], headers: Mapping[str, str]) -> Answer:
    """A JSON response of what `body` returns, or of the ApiError it raises."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await body(), headers=headers)
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)

    return Answer(work)


def stream(events: EventStream, headers: Mapping[str, str]) -> Answer:
    """Server-sent events, and `data: [DONE]` at the end.

    An ApiError before the first event gives a plain error response, one after it an event with the error.
    """

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        outlet = _Outlet(events, scope["state"]["connection"])
        raw = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **headers}.items()]
        last = DONE
        begun = False
        try:
            with events.generation:
                await outlet.first()
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                begun = True
                await outlet.rest()
        except ApiError as error:
            if not begun:
                await error_response(error)(scope, receive, send)
                return
            last = sse_event(error.body())
        except Exception:
            if not begun:
                raise
            log.exception("a stream broke")
            last = sse_event(ApiError(500, "the server made a mistake; its log says more").body())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    return Answer(work)


class _Outlet:
    """Writes the events of a stream to its connection as they come.

    Most of what a stream costs is the waking of its task, so none is woken: events are made where the engine's outputs
    are handed out, and the task waits for the end. Nothing is made while the client does not read what was written.
    """

    def __init__(self, events: EventStream, connection: Connection) -> None:
        self._generation = events.generation
        self._connection = connection
        self._take = events.take
        self._write = connection.write_chunk
        self._write_later = events.generation.write_later
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[bytes] = loop.create_future()
        self._finished: asyncio.Future[None] = loop.create_future()
        self._open = False

    async def first(self) -> None:
        """Return when there is an event to write; raises what making it raised."""
        self._generation.listen(self._wake)
        await asyncio.wait((self._first, self._finished), return_when=asyncio.FIRST_COMPLETED)
        if self._finished.done():
            self._finished.result()

    async def rest(self) -> None:
        """Write until the end; raises what making an event raised."""
        self._open = True
        self._connection.when_writable(self._wake)
        try:
            self._put(self._first.result())
            if self._generation.running:
                self._wake()
            await self._finished
        finally:
            self._connection.when_writable(None)

    def _wake(self) -> None:
        """Make the events of what has come."""
        if (self._connection.full if self._open else self._first.done()) or self._finished.done():
            return
        try:
            data = self._take()
        except Exception as error:
            self._finished.set_exception(error)
            return
        if not self._open:
            if data:
                self._first.set_result(data)
            return
        if data or not self._generation.running:
            self._put(data)

    def _put(self, data: bytes) -> None:
        self._write_later(self._write if self._generation.running else self._write_last, data)

    def _write_last(self, data: bytes) -> None:
        """The end is when all is written, not when all is made."""
        if data:
            self._write(data)
        self._finished.set_result(None)


def sse_event(body: Any) -> bytes:
    """One server-sent event of JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
