"""Connections of clients, as a front end has them from the supervisor."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 64
"""Connections taken over at once."""

log = logging.getLogger(__name__)


class Connections:
    """Takes accepted connections over from the supervisor."""

    def __init__(self, server: uvicorn.Server, closed: Callable[[], None], channel: socket.socket) -> None:
        """closed: called for each connection that has ended."""
        self._server = server
        self._closed = closed
        self._channel = channel
        self._tasks: set[asyncio.Task[Any]] = set()

    def take_over(self) -> None:
        """Called when connections have come."""
        loop = asyncio.get_running_loop()
        try:
            _, descriptors, _, _ = socket.recv_fds(self._channel, MOST_CONNECTIONS, MOST_CONNECTIONS)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            task = loop.create_task(self._adopt(socket.socket(fileno=descriptor)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not descriptors:  # the supervisor is gone, which ends the process in a moment
            loop.remove_reader(self._channel)

    async def _adopt(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # the client has gone already
            log.debug("a connection was lost: %s", error)
            connection.close()
            self._closed()

    def _protocol(self) -> HttpToolsProtocol:
        return Connection(self._server, self._closed)


class Connection(HttpToolsProtocol):
    """A client's connection: uvicorn's, and a shorter way for the parts of a streamed body.

    Routes find it in the scope's state, as "connection".
    """

    def __init__(self, server: uvicorn.Server, closed: Callable[[], None]) -> None:
        super().__init__(server.config, server.server_state, {"connection": self})
        self._closed = closed
        self._writable: Callable[[], None] | None = None
        self.full = False
        """Whether the client is behind with reading: no chunk should be written now."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body, as sending it by ASGI would; only between the start of a response and its end.

        uvicorn sends a body without Content-Length in chunks (RFC 9112, section 7.1).
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever the client has caught up."""
        self._writable = listener

    def pause_writing(self) -> None:
        """Called by the event loop when too much is unread."""
        super().pause_writing()
        self.full = True

    def resume_writing(self) -> None:
        """Called by the event loop when what was unread has been read."""
        super().resume_writing()
        self.full = False
        if self._writable is not None:
            self._writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, once."""
        super().connection_lost(exc)
        self.app_state.clear()  # it leads back here
        self._closed()
