"""Responses that are computed while the client is watched: when it goes away, the work is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError, json_response

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
            response = error.response()
        await response(scope, receive, send)

    return Answer(work)


def stream(events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> Answer:
    """Server-sent events, and `data: [DONE]` at the end.

    An ApiError before the first event gives a plain error response, one after it an event with the error.
    """

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(events):  # also when the client goes away while something is being sent
            try:
                first = await anext(events)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            raw = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **headers}.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = DONE
            except ApiError as error:
                last = event(error.body())
            except Exception:
                log.exception("a stream broke")
                last = event(ApiError(500, "the server made a mistake; its log says more").body())
            await send({"type": "http.response.body", "body": last, "more_body": False})

    return Answer(work)


def event(body: Any) -> bytes:
    """One server-sent event of JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
