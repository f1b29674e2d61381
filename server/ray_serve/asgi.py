"""Adapts the requests of Ray Serve's proxy to what the routes expect of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AsgiConnection:
    """The part of front_end.connections.Connection that streams use, over ASGI's `send`."""

    def __init__(self, send: Send) -> None:
        self.full = False
        """Whether a chunk is being sent: write no chunk while this is set."""
        self._send = send
        self._chunks: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self._on_writable: Callable[[], None] | None = None

    def write_chunk(self, data: bytes) -> None:
        """Send a part of the body, in order and without waiting."""
        self._chunks.append(data)
        self.full = True
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_chunks())

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever all chunks have been sent; None: call nothing."""
        self._on_writable = listener

    async def send(self, message: Message) -> None:
        """Send a message after all chunks. Raises what sending a chunk raised."""
        while self._sending is not None:
            await self._sending
        await self._send(message)

    async def _send_chunks(self) -> None:
        try:
            while self._chunks:
                data, self._chunks = b"".join(self._chunks), []
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._sending = None
            self.full = False
        if self._on_writable is not None:
            self._on_writable()


def with_connections(app: ASGIApp) -> ASGIApp:
    """`app`, with an AsgiConnection in the state of each request's scope."""

    async def adapted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection = AsgiConnection(send)
            scope = {**scope, "state": {**scope.get("state", {}), "connection": connection}}
            send = connection.send
        await app(scope, receive, send)

    return adapted
