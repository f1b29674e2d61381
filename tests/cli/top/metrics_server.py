"""A server that answers /metrics and /health as a test has written down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.cli.top.scrapes import metrics


class MetricsServer(ThreadingHTTPServer):
    """Answers each /metrics with twice the counters of the one before."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scale = 1.0
        self.options: dict[str, Any] = {}
        """Arguments of `metrics`."""
        self.text: str | None = None
        """Instead of metrics."""
        self.status = 200
        self.health: dict[str, Any] = {"status": "ok"}
        self.closing = False
        """Whether each connection is closed after one answer."""
        self.keys: list[str | None] = []
        """The header Authorization of every request."""
        self.clients: set[Any] = set()
        """Addresses of the connections."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetricsServer

    def do_GET(self) -> None:
        server = self.server
        server.keys.append(self.headers.get("authorization"))
        server.clients.add(self.client_address)
        if self.path.endswith("/health"):
            status, body = (200 if server.health["status"] == "ok" else 503), json.dumps(server.health)
        else:
            status, body = (
                server.status,
                metrics(server.scale, **server.options) if server.text is None else server.text,
            )
            server.scale *= 2
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = server.closing  # without saying so, as at a timeout

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def metrics_server() -> Iterator[MetricsServer]:
    """A running server; after the block, its port is free and its connections are closed."""
    with MetricsServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)
