"""An OpenTelemetry collector for tests: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """What a collector has received."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.messages: list[ExportTraceServiceRequest] = []
        self.status = 200

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for message in self.messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def of_trace(self, trace_id: str) -> dict[str, list[Span]]:
        """The spans of a trace, by name."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace_id.hex() == trace_id:
                found.setdefault(span.name, []).append(span)
        return found


def attributes(pairs: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {pair.key: _plain(pair.value) for pair in pairs.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    assert kind is not None
    return getattr(value, kind)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A collector that runs during the block."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            found.paths.append(self.path)
            found.messages.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(found.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
