"""Gives each response a request ID, and counts and logs each request."""

from __future__ import annotations

import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.front_end import access_log
from engine.server.front_end.request_ids import HEADERS, REQUEST_IDS, RequestIds, current
from engine.server.front_end.request_trace import TRACE, RequestTrace
from engine.server.front_end.trace_context import context_of
from engine.server.http.http_counter import HttpCounter

REQUEST_ID = b"x-request-id"
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""A client's own request ID; another is replaced, since it ends up in headers and logs."""


class RequestLog:
    """Middleware around the whole application; it sees every response."""

    def __init__(self, app: ASGIApp, counter: HttpCounter, *, structured: bool = False) -> None:
        """structured: whether the log entries of a request have its IDs, as those in JSON do."""
        self._app = app
        self._counter = counter
        self._log = access_log.is_on()
        self._structured = structured

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the ID is the client's, else that of the completion, else a new one."""
        start = time.monotonic()
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        ids = RequestIds(given if _USABLE_ID.fullmatch(given) else b"")
        scope["state"][REQUEST_IDS] = ids
        if self._log or self._structured:
            ids.trace_id = _trace_id(scope)
        if self._structured:
            current.set(ids)  # the task ends with the request
        status = access_log.CLIENT_LEFT

        async def send_message(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                if not ids.request_id:
                    own = (value for name, value in headers if name == REQUEST_ID)
                    ids.request_id = next(own, b"")
                others = [header for header in headers if header[0] not in HEADERS]
                message = {**message, "headers": [*others, *ids.headers()]}
            await send(message)

        try:
            await self._app(scope, receive, send_message)
        finally:
            seconds = time.monotonic() - start
            self._counter.observe(scope, status, seconds)
            if self._log:
                client = scope.get("client")
                access_log.write(
                    access_log.Access(
                        client=f"{client[0]}:{client[1]}" if client else "",
                        method=scope["method"],
                        target=access_log.target(scope["raw_path"], scope["query_string"]),
                        status=status,
                        seconds=seconds,
                        request_id=ids.known().decode(),
                        trace_id=ids.trace_id or None,
                        key=scope["state"].get("key"),
                    )
                )


def _trace_id(scope: Scope) -> str:
    """The ID of the trace that the request belongs to; empty if there is none."""
    trace: RequestTrace | None = scope["state"].get(TRACE)
    context = trace.context if trace is not None else context_of(scope["headers"])
    return context.trace_id if context is not None else ""
