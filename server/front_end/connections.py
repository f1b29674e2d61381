"""Client connections that the supervisor passes to a front end."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn

from engine.server.front_end.http_protocol import HttpProtocol

MAX_CONNECTIONS = 64
"""Maximum number of connections received per call."""

log = logging.getLogger(__name__)


class ConnectionReceiver:
    """Receives accepted connections from the supervisor and serves them with uvicorn."""

    def __init__(
        self,
        server: uvicorn.Server,
        on_closed: Callable[[], None],
        channel: socket.socket,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """on_closed: called for each connection that has ended. channel: receives the file descriptors."""
        self._tls = tls
        self._server = server
        self._on_closed = on_closed
        self._channel = channel
        self._tasks: set[asyncio.Task[Any]] = set()

    def receive(self) -> None:
        """Receive the waiting connections; called when `channel` is readable."""
        loop = asyncio.get_running_loop()
        try:
            _, descriptors, _, _ = socket.recv_fds(self._channel, MAX_CONNECTIONS, MAX_CONNECTIONS)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            task = loop.create_task(self._serve(socket.socket(fileno=descriptor)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not descriptors:  # the supervisor has exited, which ends this process in a moment
            loop.remove_reader(self._channel)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except OSError as error:  # the client has disconnected already
            log.debug("a connection was lost: %s", error)
            connection.close()
            self._on_closed()

    def _protocol(self) -> HttpProtocol:
        return Connection(self._server, self._on_closed)


class Connection(HttpProtocol):
    """A client's connection, with a faster path for the chunks of a streamed body.

    Routes find the connection in the scope's state, as "connection".
    """

    def __init__(self, server: uvicorn.Server, on_closed: Callable[[], None]) -> None:
        super().__init__(server, {"connection": self})
        self._on_closed = on_closed
        self._on_writable: Callable[[], None] | None = None
        self.full = False
        """Whether the client reads too slowly: write no chunk while this is set."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body as ASGI's `send` would; only between the start and the end of a response.

        A body without Content-Length is sent in chunks (RFC 9112, section 7.1).
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever the client has caught up; None: call nothing."""
        self._on_writable = listener

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state.clear()  # holds a reference to this object
        self._on_closed()
