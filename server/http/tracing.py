"""The middleware that traces requests; it is there only with server.otlp_endpoint."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.front_end.errors import excerpt
from engine.server.front_end.request_trace import TRACE, RequestTrace, Tracer
from engine.server.front_end.trace_context import TRACEPARENT, context_of
from engine.server.http.request_log import REQUEST_ID

PROBES = frozenset({"/health", "/ping", "/metrics"})
"""Paths that are asked every few seconds: traced only for a client that sends a trace context."""


class Tracing:
    """Middleware around the request log: begins and ends the trace of each request."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the response names the request's own span."""
        parent = context_of(scope["headers"])
        if parent is None and scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        trace = scope["state"][TRACE] = RequestTrace(
            context=self._tracer.begin(parent),
            parent=parent,
            method=scope["method"],
            path=excerpt(scope["path"]),
            scheme=scope["scheme"],
            http_version=scope["http_version"],
            client=client[0] if client else "",
            began=time.monotonic(),
        )

        async def send_message(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                headers = message["headers"]
                trace.request_id = next((value.decode() for name, value in headers if name == REQUEST_ID), "")
                message = {**message, "headers": [*headers, (TRACEPARENT, trace.context.header)]}
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                trace.complete = True
            await send(message)

        try:
            await self._app(scope, receive, send_message)
        finally:
            trace.ended = time.monotonic()
            if trace.status != 404:  # the path of no route could be anything, and names would have no limit
                trace.route = getattr(scope.get("route"), "path", "") or trace.path
            self._tracer.end(trace)
