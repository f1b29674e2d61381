"""Responses that are computed while the client is watched: when it goes away, the work is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError, json_response

log = logging.getLogger(__name__)

Work = Callable[[Scope, Receive, Send], Awaitable[None]]
Put = Callable[[bytes], Awaitable[None]]
"""Sends a part of a stream."""

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
            response = error.response()
        await response(scope, receive, send)

    return Answer(work)


def stream(events: Callable[[Put], Awaitable[None]], headers: Mapping[str, str]) -> Answer:
    """Server-sent events, which `events` puts out, and `data: [DONE]` at the end.

    An ApiError before the first event gives a plain error response, one after it an event with the error.
    """

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **headers}.items()]
        begun = False

        async def put(data: bytes) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await events(put)
            last = DONE
        except ApiError as error:
            if not begun:
                await error.response()(scope, receive, send)
                return
            last = event(error.body())
        except Exception:
            if not begun:
                raise
            log.exception("a stream broke")
            last = event(ApiError(500, "the server made a mistake; its log says more").body())
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": last, "more_body": False})

    return Answer(work)


def event(body: Any) -> bytes:
    """One server-sent event of JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
