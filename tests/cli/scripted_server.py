"""A server with OpenAI's routes that answers as a test has written down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    """Sends each chat the next of its answers, and keeps what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: Sequence[str] = ("parrot",)
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        """Bodies of the chats."""
        self.keys: list[str | None] = []
        """The header Authorization of every request."""
        self.left = threading.Event()
        """Set when a client has gone before the end of its answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Print nothing about clients that left."""


class Answer:
    """An answer to a chat: `deltas` as a stream, with `end` after them."""

    def __init__(
        self,
        *deltas: dict[str, Any] | bytes,
        finish: str | None = "stop",
        status: int = 200,
        body: bytes = b"",
        kind: str = "text/event-stream",
        forever: bool = False,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """deltas: bytes are sent as they are. finish: None: the connection ends without a word.

        body: the whole response, in place of a stream. forever: go on until the client leaves.
        """
        self.status, self.body, self.kind, self.forever, self.headers = status, body, kind, forever, headers
        self.events = [delta if isinstance(delta, bytes) else event({"delta": delta}) for delta in deltas]
        if finish is not None:
            self.events += [event({"delta": {}, "finish_reason": finish}), b"data: [DONE]\n\n"]


def event(choice: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, **choice}]}).encode()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("authorization"))
        data = [{"id": name, "object": "model"} for name in self.server.models]
        self._respond(Answer(body=json.dumps({"data": data}).encode(), kind="application/json"))

    def do_POST(self) -> None:
        self.server.keys.append(self.headers.get("authorization"))
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._respond(self.server.answers.pop(0))

    def _respond(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in (("content-type", answer.kind), *answer.headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)
        try:
            for one in answer.events if not answer.body else ():
                self.wfile.write(one)
            while answer.forever:
                self.wfile.write(event({"delta": {"content": "more "}}))
        except OSError:
            self.server.left.set()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """A server in a thread of this process."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
