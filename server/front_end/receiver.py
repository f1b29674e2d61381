"""Receives client connections from the supervisor, and keeps their number and their times within the limits."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import OrderedDict
from typing import Any

import uvicorn

from engine.core.config import ServerConfig
from engine.core.errors import ConfigError
from engine.server.front_end.connections import Connection, ConnectionOwner
from engine.server.front_end.errors import ApiError
from engine.server.shared.descriptors import count_open_descriptors, descriptor_limit
from engine.server.shared.metrics_table import HEARTBEAT_INTERVAL, DropReason, FrontEndMetrics
from engine.server.shared.throttled_log import ThrottledWarning

BATCH = 16
"""Maximum connections received before the event loop continues with other work."""
MAX_REFUSED = 16
"""Maximum connections above the limit that stay open for a moment, to be answered with 503; others are closed."""
RESERVE = 16 + MAX_REFUSED
"""Descriptors kept free of connections: for connections that are refused, links to engine processes, and files."""
MIN_IDLE = 1.0
"""Seconds for which a connection must be idle before another may take its place."""
RETRY = 0.1
"""Seconds until the next attempt to receive connections after a failure."""
TOO_MANY = ApiError(
    503,
    "the server has too many open connections (server.max_connections); try again later",
    code="too_many_connections",
    headers={"retry-after": "1"},
)

log = logging.getLogger(__name__)


def connection_capacity(config: ServerConfig) -> int:
    """Maximum number of client connections of this process. Raises ConfigError when there is room for none."""
    limit = descriptor_limit()
    capacity = min(config.max_connections, limit - count_open_descriptors() - RESERVE)
    if capacity < 1:
        needed = limit + 1 - capacity
        raise ConfigError(f"the limit of open files (ulimit -n) is {limit}; the server needs at least {needed}")
    return capacity


class ConnectionReceiver(ConnectionOwner):
    """Receives accepted connections from the supervisor and serves them with uvicorn."""

    def __init__(
        self,
        server: uvicorn.Server,
        limits: ServerConfig,
        metrics: FrontEndMetrics,
        channel: socket.socket,
        capacity: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """channel: receives the file descriptors. capacity: maximum number of connections."""
        self._server = server
        self._limits = limits
        self._metrics = metrics
        self._channel = channel
        self._capacity = capacity
        self._tls = tls
        self._handshake_timeout = limits.header_timeout if tls is not None else None
        self._handshakes: dict[asyncio.Task[Any], float] = {}
        """Connections that are not established yet and when each was received, oldest first; TLS takes a while."""
        self._connections: set[Connection] = set()
        self._num_open = 0
        """Received connections that have not ended; some may not be established yet."""
        self._num_refused = 0
        """Connections above the limit that are still open."""
        self._idle: OrderedDict[Connection, float] = OrderedDict()
        """Idle connections and when each became idle, longest idle first."""
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._lost = ThrottledWarning(
            log,
            "lost connections: %d, for want of a file descriptor in this process; raise the limit of open files "
            "(ulimit -n), or lower server.max_connections",
        )
        self._failed = ThrottledWarning(log, "failed attempts to receive a connection: %d (%s)")
        self._full = ThrottledWarning(
            log,
            "refused connections: %d, because this front end has %d already; raise server.max_connections or the "
            "limit of open files (ulimit -n), or start more front ends (--api-workers)",
        )

    def start(self) -> None:
        """Receive connections from now on."""
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._receive)
        self._check_times()

    def stop(self) -> None:
        """Receive no more connections."""
        asyncio.get_running_loop().remove_reader(self._channel)
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._idle[connection] = asyncio.get_running_loop().time()

    def set_idle(self, connection: Connection, idle: bool) -> None:
        if idle:
            self._idle[connection] = asyncio.get_running_loop().time()
        else:
            self._idle.pop(connection, None)

    def dropped(self, reason: DropReason) -> None:
        self._metrics.count_dropped(reason)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        self._end()

    def _receive(self) -> None:
        """Receive waiting connections; called when the channel is readable."""
        for _ in range(BATCH):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, BATCH, BATCH)
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors on some systems, or no memory
                self._failed.count(1, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._channel)
                self._retry = loop.call_later(RETRY, loop.add_reader, self._channel, self._receive)
                return
            if not data:  # the supervisor has exited, which ends this process in a moment
                asyncio.get_running_loop().remove_reader(self._channel)
                return
            # The supervisor sends one byte with each descriptor. The kernel has closed those it could not pass on.
            if lost := len(data) - len(descriptors):
                self._metrics.count_closed_connections(lost)
                self._metrics.count_dropped("lost", lost)
                self._lost.count(lost)
                self._evict(lost)
            for descriptor in descriptors:
                self._admit(socket.socket(fileno=descriptor))

    def _admit(self, connection: socket.socket) -> None:
        """Serve a connection, or refuse it if there are too many."""
        self._num_open += 1
        self._metrics.connections = self._num_open
        refused = self._num_open - self._num_refused > self._capacity and not self._evict(1)
        if refused:
            self._full.count(1, self._capacity)
            if self._num_refused >= MAX_REFUSED:
                self.dropped("refused")
                connection.close()
                self._end()
                return
            self._num_refused += 1
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(connection, refused))
        self._handshakes[task] = loop.time()
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _serve(self, connection: socket.socket, refused: bool) -> None:
        protocol = (_RefusedConnection if refused else Connection)(self._server, self._limits, self)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout
            )
        except (OSError, asyncio.CancelledError) as error:  # the client has disconnected, or another needed its place
            log.debug("a connection was lost: %s", error)
            if protocol.transport is not None:
                protocol.transport.abort()
                return
            connection.close()
            if refused:
                self._num_refused -= 1
            self._end()

    def end_refusal(self) -> None:
        """Record that a refused connection has ended."""
        self._num_refused -= 1

    def _end(self) -> None:
        """Record that a connection has ended."""
        self._num_open -= 1
        self._metrics.connections = self._num_open
        self._metrics.count_closed_connections()

    def _evict(self, count: int) -> bool:
        """Close the `count` connections that have been idle, or not established, longest; False: there were fewer."""
        latest = asyncio.get_running_loop().time() - MIN_IDLE
        waiting: list[Connection] = []
        while count and self._idle:
            connection, since = next(iter(self._idle.items()))
            if since > latest:
                break
            del self._idle[connection]
            if connection.has_traffic:
                waiting.append(connection)
                continue
            connection.transport.abort()  # closed by the event loop in a moment
            self._metrics.count_dropped("evicted")
            count -= 1
        for connection in waiting:
            self._idle[connection] = latest + MIN_IDLE
        for task, since in list(self._handshakes.items()) if count else ():
            if not count or since > latest:
                break
            del self._handshakes[task]
            task.cancel()
            self._metrics.count_dropped("evicted")
            count -= 1
        return not count

    def _check_times(self) -> None:
        """Close connections whose time is up; schedules its next call."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.check_time(now)
        self._timer = loop.call_later(HEARTBEAT_INTERVAL, self._check_times)


class _RefusedConnection(Connection):
    """A connection above the limit: answers 503 immediately."""

    _owner: ConnectionReceiver

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._refuse(TOO_MANY, "refused")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._owner.end_refusal()
