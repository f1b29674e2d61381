"""A client's connection: HTTP with limits of size and time."""

from __future__ import annotations

import asyncio
import fcntl
import select
import termios
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import uvicorn

from engine.core.config import ServerConfig
from engine.server.front_end.errors import ApiError
from engine.server.front_end.http_protocol import HttpProtocol
from engine.server.shared.metrics_table import DropReason

HEADER_FRAMING = 4
"""Bytes of a header besides name and value: colon, space and the end of the line."""
CHUNK_FRAMING = 32
"""Bytes of a chunk's frame that count towards no limit."""
MAX_PIPELINED = 16
"""Maximum requests that wait on one connection for the answer to an earlier one."""
MIN_END_CHECK, MAX_END_CHECK = 0.01, 0.1
"""Seconds between two checks whether a connection can end at the end of the server; doubled each time."""


class ConnectionOwner(ABC):
    """What a connection reports its changes to."""

    @abstractmethod
    def opened(self, connection: Connection) -> None:
        """The connection is established and idle."""

    @abstractmethod
    def set_idle(self, connection: Connection, idle: bool) -> None:
        """The connection has become idle, or has begun a request."""

    @abstractmethod
    def dropped(self, reason: DropReason) -> None:
        """The server closes the connection early."""

    @abstractmethod
    def closed(self, connection: Connection) -> None:
        """The connection has ended."""


class Connection(HttpProtocol):
    """A client's connection, with limits, and with a faster path for the chunks of a streamed body.

    Limits of size hold while a request arrives, before the application knows of the request. Limits of time hold when
    the owner calls `check_time`. Routes find the connection in the scope's state, as "connection".
    """

    def __init__(self, server: uvicorn.Server, limits: ServerConfig, owner: ConnectionOwner) -> None:
        super().__init__(server, {"connection": self})
        self._limits = limits
        self._owner = owner
        self._on_writable: Callable[[], None] | None = None
        self.full = False
        """Whether the client reads too slowly: write no chunk while this is set."""
        self._since = 0.0
        """When this server began to wait for what the client is to send next, loop.time()."""
        self._head_bytes = 0
        """Size of the request's URL and headers; while its body arrives, of its trailers."""
        self._num_trailers = 0
        self._unparsed = 0
        """Received bytes that are neither of a body nor counted in `_head_bytes`: those of an incomplete header."""
        self._unread: int | None = None
        """Bytes that waited for the client at the last check; None: the client is not late."""
        self._last_read = 0.0
        """When the client was last seen to read, while it is late."""
        self._end_check: asyncio.TimerHandle | None = None
        """The next _check_end; None: the server is not ending."""

    # --- called by the owner ---

    @property
    def idle(self) -> bool:
        """Whether no request is arriving or being answered."""
        return not (self._in_message or self._is_answering() or self._discarding or self.transport.is_closing())

    @property
    def has_traffic(self) -> bool:
        """Whether the client still has something to read, or has sent something that this process has not read."""
        if self.transport.get_write_buffer_size():
            return True
        if self.transport.is_closing():  # without a socket where TLS has closed it
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def check_time(self, now: float) -> None:
        """Close the connection if one of its limits of time has passed; now: loop.time()."""
        limits, seconds = self._limits, now - self._since
        if self.full or self.transport.is_closing():
            self._check_reader(now)
        elif self._discarding or (self._is_answering() and (not self._in_body or self.pipeline)):
            self.check_paused()  # nothing that the client sends is waited for
        elif self._in_body:
            if seconds > limits.body_timeout:
                self._time_out("body_timeout", "the request's body", limits.body_timeout)
        elif self._in_message:
            if seconds > limits.header_timeout:
                self._time_out("header_timeout", "the request's headers", limits.header_timeout)
        elif seconds > limits.keep_alive_timeout:
            self.transport.close()

    # --- called by the responses ---

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever the client has caught up; None: call nothing."""
        self._on_writable = listener

    # --- called by the transport ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._limits.max_header_bytes and not self._discarding:
            self.refuse(self._size_error())

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False
        self._unread = None
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._end_check is not None:
            self._end_check.cancel()
        self.app_state.clear()  # holds a reference to this object
        self._owner.closed(self)

    # --- called by the parser; what raises ApiError refuses the request ---

    def on_message_begin(self) -> None:
        if self._repeating_head:
            return
        self._owner.set_idle(self, False)
        super().on_message_begin()
        self._head_bytes = self._num_trailers = self._unparsed = 0
        self._since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeating_head:
            return
        if self._in_body:  # a trailer, of which no route knows
            self._num_trailers += 1
        else:
            super().on_header(name, value)
        limit = self._limits.max_headers
        if len(self.headers) + self._num_trailers > limit:
            message = f"the request has more than {limit} headers (server.max_headers); send fewer"
            raise ApiError(431, message, code="headers_too_large")
        self._count_head(len(name) + len(value) + HEADER_FRAMING)

    def on_headers_complete(self) -> None:
        if self._repeating_head:
            return
        super().on_headers_complete()
        self._head_bytes = self._unparsed = 0
        self._since = self.loop.time()
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection; wait for answers, or open another"
            raise ApiError(400, message, code="too_many_pipelined")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = max(0, self._unparsed - len(body))

    def on_chunk_header(self) -> None:
        """Called at the end of the line before each chunk."""
        self._unparsed = max(0, self._unparsed - CHUNK_FRAMING)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._in_message:  # an offer of another protocol ends the message for one parser, but not for the next
            return
        self._unparsed = 0
        self._since = self.loop.time()
        if self.idle:  # the response came before the end of the body
            self._owner.set_idle(self, True)

    # --- called by uvicorn ---

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_body or self._is_answering():
            self._since = self.loop.time()
        if self.idle:
            self._owner.set_idle(self, True)

    def shutdown(self) -> None:
        """Close the connection at the end of the server, or make its response the last.

        By TLS, closing waits for the client to close as well, which an idle client does not; so a client that has all
        its data is not waited for.
        """
        super().shutdown()
        if self.scheme == "https":
            self._schedule_end_check(MIN_END_CHECK, False)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: `check_time` closes idle connections, also those that have never sent a request."""

    def refuse(self, error: ApiError) -> None:
        """See HttpProtocol; counts the connection as dropped."""
        self._refuse(error, "invalid")

    def _refuse(self, error: ApiError, reason: DropReason) -> None:
        self._owner.dropped(reason)
        self._owner.set_idle(self, False)
        super().refuse(error)

    def _count_head(self, size: int) -> None:
        """Count `size` bytes of the head. Raises ApiError if the head is too large."""
        self._unparsed = 0
        self._head_bytes += size
        if self._head_bytes > self._limits.max_header_bytes:
            raise self._size_error()

    def _size_error(self) -> ApiError:
        limit = f"{self._limits.max_header_bytes} bytes (server.max_header_bytes)"
        if self._in_body:
            message = f"the trailers or chunk extensions of the body exceed {limit}; send smaller ones"
        elif self._in_message and len(self.url) > self._limits.max_header_bytes:
            return ApiError(414, f"the URL exceeds {limit}; send parameters in the body", code="url_too_long")
        else:
            message = f"the URL and headers of the request exceed {limit}; send smaller ones"
        return ApiError(431, message, code="headers_too_large")

    def _time_out(self, reason: DropReason, part: str, seconds: float) -> None:
        """Refuse a request of which `part` does not arrive; reason: the name of the setting, too."""
        message = f"{part} did not arrive within {seconds:g} s (server.{reason}); send the request again"
        self._refuse(ApiError(408, message, code="request_timeout"), reason)

    def _check_reader(self, now: float) -> None:
        """Abort the connection if the client reads nothing of what waits for it."""
        unread = self._count_unread()
        if self._unread is None or unread < self._unread:
            self._last_read = now
        self._unread = unread
        if now - self._last_read > self._limits.write_timeout:
            self._owner.dropped("write_timeout")
            self.transport.abort()

    def _schedule_end_check(self, seconds: float, had_all: bool) -> None:
        self._end_check = self.loop.call_later(seconds, self._check_end, min(2 * seconds, MAX_END_CHECK), had_all)

    def _check_end(self, seconds: float, had_all: bool) -> None:
        """Abort the connection if it is closing and the client has all its data; checks again after `seconds`.

        had_all: whether the client had all at the last check. Twice, since what TLS has encrypted may wait in the event
        loop, which no counter includes; between two checks the loop passes it to the kernel, if the kernel has room.
        """
        has_all = self.transport.is_closing() and not self._count_unread()
        if has_all and had_all:
            self.transport.abort()
        else:
            self._schedule_end_check(seconds, has_all)

    def _count_unread(self) -> int:
        """Number of bytes that wait in this process and in the kernel for the client to read them."""
        waiting = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        if connection is None:  # closed by TLS, which reports that in a moment
            return waiting
        try:  # Linux: what the client has not acknowledged; its buffer may be large, so `waiting` alone moves in jumps
            unread = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except (OSError, ValueError):  # not on this system, or closed already
            return waiting
        return waiting + int.from_bytes(unread, "little")
