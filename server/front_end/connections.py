"""A client's connection: uvicorn's HTTP protocol with limits of size and time."""

from __future__ import annotations

import enum
import fcntl
import select
import termios
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.core.config import ServerConfig
from engine.server.front_end.errors import ApiError
from engine.server.shared.metrics_table import DropReason

HEADER_FRAMING = 4
"""Bytes of a header besides name and value: colon, space and the end of the line."""
CHUNK_FRAMING = 32
"""Bytes of a chunk's frame that count towards no limit."""
MAX_PIPELINED = 16
"""Maximum requests that wait on one connection for the answer to an earlier one."""
LINGER_SECONDS = 3.0
"""Seconds for which a refused connection stays open, for the client to read why."""


class Stage(enum.Enum):
    """What the client is to send next."""

    IDLE = enum.auto()
    """A request, of which nothing has come."""
    HEAD = enum.auto()
    """The rest of a request's URL and headers."""
    BODY = enum.auto()
    """The rest of a request's body."""


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
        """The connection is closed before the client wanted that."""

    @abstractmethod
    def closed(self, connection: Connection) -> None:
        """The connection has ended."""


class Connection(HttpToolsProtocol):
    """A client's connection: uvicorn's protocol, its limits, and a faster path for the chunks of a streamed body.

    The limits of a request's head hold while the head arrives, before the request is known to anyone. Limits of time
    hold when the owner calls `check_time`. Routes find the connection in the scope's state, as "connection".
    """

    def __init__(self, server: uvicorn.Server, limits: ServerConfig, owner: ConnectionOwner) -> None:
        super().__init__(server.config, server.server_state, {"connection": self})
        self._limits = limits
        self._owner = owner
        self._on_writable: Callable[[], None] | None = None
        self.full = False
        """Whether the client reads too slowly: write no chunk while this is set."""
        self._stage = Stage.IDLE
        self._since = 0.0
        """When the stage began, or when the last response ended if that is later; loop.time()."""
        self._head_bytes = 0
        """Size of the current request's URL and headers; in the stage BODY, of its trailers."""
        self._num_trailers = 0
        self._unparsed = 0
        """Received bytes that are neither of a body nor counted in `_head_bytes`: those of an incomplete header."""
        self._ignores_input = False
        self._refused_at: float | None = None
        """When the connection was refused, which then only waits for the client to read why."""
        self._unread: int | None = None
        """Bytes that wait for the client, as of the last check; None: the client is not late."""
        self._last_read = 0.0
        """When the client was last seen to read, while it is late."""

    # --- called by the owner ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._owner.opened(self)

    @property
    def idle(self) -> bool:
        """Whether no request is arriving or being answered."""
        return (
            self._stage is Stage.IDLE
            and not self._answering
            and self._refused_at is None
            and not self.transport.is_closing()
        )

    @property
    def has_traffic(self) -> bool:
        """Whether the client still has something to read, or has sent something that this process has not read."""
        if self.transport.get_write_buffer_size():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def check_time(self, now: float) -> None:
        """Close the connection if one of its limits of time has passed; now: loop.time()."""
        limits = self._limits
        if self._refused_at is not None:
            if now - self._refused_at > LINGER_SECONDS:
                self.transport.abort()
        elif self.full or self.transport.is_closing():
            self._check_reader(now)
        elif self._answering and (self._stage is not Stage.BODY or self.pipeline):
            pass  # the client waits for this server
        elif self._stage is Stage.HEAD and now - self._since > limits.header_timeout:
            self._owner.dropped("header_timeout")
            self._time_out("the request's headers", limits.header_timeout, "server.header_timeout")
        elif self._stage is Stage.BODY and now - self._since > limits.body_timeout:
            self._owner.dropped("body_timeout")
            self._time_out("the request's body", limits.body_timeout, "server.body_timeout")
        elif self._stage is Stage.IDLE and now - self._since > limits.keep_alive_timeout:
            self.transport.close()

    def refuse(self, error: ApiError) -> None:
        """Answer with `error`, ignore what the client still sends, and close the connection when the client has."""
        self._ignores_input = True
        self._refused_at = self.loop.time()
        self._owner.set_idle(self, False)
        if self._answering:  # the route waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(encode_response(error, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()  # closing now would discard the answer if the client is still sending
        else:
            self.transport.close()

    # --- called by the responses ---

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body as ASGI's `send` would; only between the start and the end of a response.

        uvicorn sends a body without Content-Length in chunks (RFC 9112, section 7.1).
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever the client has caught up; None: call nothing."""
        self._on_writable = listener

    # --- called by the transport ---

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._unparsed += len(data)
        try:
            self.parser.feed_data(data)
            if self._unparsed > self._limits.max_header_bytes:
                self._refuse_input(self._size_error())
        except httptools.HttpParserUpgrade:
            pass  # RFC 9110, section 7.8: a server may ignore the offer of another protocol
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised by one of the callbacks below
            unreadable = ApiError(400, f"the request is not valid HTTP: {error}", code="invalid_http")
            self._refuse_input(cause if isinstance(cause, ApiError) else unreadable)

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
        self.app_state.clear()  # holds a reference to this object
        self._owner.closed(self)

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._num_trailers = self._unparsed = 0
        if self.idle:
            self._owner.set_idle(self, False)
        self._begin_stage(Stage.HEAD)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unparsed = 0
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.max_header_bytes:
            raise self._size_error()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        self._head_bytes += len(name) + len(value) + HEADER_FRAMING
        if self._stage is Stage.BODY:  # a trailer, of which no route knows
            self._num_trailers += 1
        else:
            super().on_header(name, value)
        if len(self.headers) + self._num_trailers > self._limits.max_headers:
            limit = self._limits.max_headers
            message = f"the request has more than {limit} headers (server.max_headers); send fewer"
            raise ApiError(431, message, code="headers_too_large")
        if self._head_bytes > self._limits.max_header_bytes:
            raise self._size_error()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self._announces_body():
            # The parser would take the body for the next request.
            message = "this server speaks HTTP/1.1 only; send a request that has a body without the header Upgrade"
            raise ApiError(400, message, code="invalid_http")
        self._head_bytes = self._unparsed = 0
        super().on_headers_complete()
        self._begin_stage(Stage.BODY)
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection; wait for answers, or open another"
            raise ApiError(400, message, code="too_many_pipelined")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = max(0, self._unparsed - len(body))

    def on_chunk_header(self) -> None:
        """See httptools; called at the end of the line before each chunk."""
        self._unparsed = max(0, self._unparsed - CHUNK_FRAMING)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unparsed = 0
        self._begin_stage(Stage.IDLE)
        if self.idle:  # the response came before the end of the body
            self._owner.set_idle(self, True)

    # --- called by uvicorn ---

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._stage is not Stage.BODY or self._answering:
            self._since = self.loop.time()
        if self.idle:
            self._owner.set_idle(self, True)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: `check_time` closes idle connections, also those that have never sent a request."""

    @property
    def _answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_stage(self, stage: Stage) -> None:
        self._stage = stage
        self._since = self.loop.time()

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
            for name, value in self.headers
        )

    def _size_error(self) -> ApiError:
        limit = f"{self._limits.max_header_bytes} bytes (server.max_header_bytes)"
        if self._stage is Stage.BODY:
            message = f"the trailers or chunk extensions of the body exceed {limit}; send smaller ones"
        elif self._stage is Stage.HEAD and len(self.url) > self._limits.max_header_bytes:
            return ApiError(414, f"the URL exceeds {limit}; send parameters in the body", code="url_too_long")
        else:
            message = f"the URL and headers of the request exceed {limit}; send smaller ones"
        return ApiError(431, message, code="headers_too_large")

    def _time_out(self, part: str, seconds: float, setting: str) -> None:
        """Refuse a request that does not arrive."""
        message = f"{part} did not arrive within {seconds:g} s ({setting}); send the request again"
        self._refuse_now(ApiError(408, message, code="request_timeout"))

    def _refuse_input(self, error: ApiError) -> None:
        """Refuse what the client has sent, and read no more of the connection."""
        self._owner.dropped("invalid")
        if self._answering and not self.cycle.more_body and not self.pipeline:
            self._ignores_input = True  # what came is not part of the request that is being answered
            self.cycle.keep_alive = False
        else:
            self._refuse_now(error)

    def _refuse_now(self, error: ApiError) -> None:
        """Send `error`, unless this request has a response or an earlier one waits for its; close the connection."""
        if self.pipeline or (self._stage is Stage.BODY and self.cycle.response_started):
            self._ignores_input = True
            self.transport.close()
        else:
            self.refuse(error)

    def _check_reader(self, now: float) -> None:
        """Abort the connection if the client reads nothing of what waits for it."""
        unread = self._count_unread()
        if self._unread is None or unread < self._unread:
            self._last_read = now
        self._unread = unread
        if now - self._last_read > self._limits.write_timeout:
            self._owner.dropped("write_timeout")
            self.transport.abort()

    def _count_unread(self) -> int:
        """Number of bytes that wait in this process and in the kernel for the client to read them."""
        waiting = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        try:  # Linux: what the client has not acknowledged; its buffer may be large, so `waiting` alone moves in jumps
            unread = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except (OSError, ValueError):  # not on this system, or closed already
            return waiting
        return waiting + int.from_bytes(unread, "little")


def encode_response(error: ApiError, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """`error` as the last HTTP response of a connection; headers: additional ones."""
    body = msgspec.json.encode(error.body())
    own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    own += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
    return status + b"".join(b"%b: %b\r\n" % header for header in (*headers, *own)) + b"\r\n" + body
