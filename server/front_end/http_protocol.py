"""HTTP/1 on one connection: uvicorn's protocol, and what uvicorn leaves out.

Framing errors in OpenAI's shape; bodies of HTTP/1.0 responses, which have no chunks; clients that shut down their side
of the connection and wait for the response; and a lingering close, without which a client that is still sending when it
is refused sees a reset connection instead of the refusal (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.server.front_end import access_log
from engine.server.front_end.errors import ApiError, body_of
from engine.server.front_end.peer import enable_keepalive, has_hung_up, has_shut_down
from engine.server.front_end.request_ids import REQUEST_IDS, RequestIds

LINGER_SECONDS = 5.0
"""Seconds in which a refused client may finish sending."""
UNREAD_BODY = 64 * 2**10
"""Bytes of an unread body up to which the connection stays open for the next request."""
MIN_CHECK, MAX_CHECK = 0.01, 5.0
"""Seconds between two checks for a half-closed client that has left; doubled each time."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EVENT_STREAM = b"text/event-stream"
COMMENT = b":\n\n"
"""An empty comment between server-sent events."""
TLS_HANDSHAKE = b"\x16\x03"
INVALID_TARGET = "the target of the request is not a valid path; percent-encode special characters"

log = logging.getLogger(__name__)


class HttpProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, server: uvicorn.Server, state: dict[str, Any]) -> None:
        """state: `state` of the ASGI scopes."""
        super().__init__(server.config, server.server_state, state)
        self._application = self.app
        self.app = self._serve
        self.chunked = True
        """Whether bodies of unknown length are sent in chunks; not to a client of HTTP/1.0."""
        self._queued: deque[RequestResponseCycle] = deque()
        """Requests whose answer has not begun, in the order in which they came."""
        self._current: RequestResponseCycle | None = None
        """The request being answered, or answered last."""
        self._in_message = False
        """Whether the client is in the middle of a request."""
        self._in_body = False
        self._discarding = False
        """Whether everything that the client still sends is ignored."""
        self._repeating_head = False
        """Whether the parser reads a head again: _replace_parser."""
        self._streams_events = False
        """Whether the response being sent consists of server-sent events."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends the lingering close."""
        self._next_check: asyncio.TimerHandle | None = None
        """The next _check_client; None: the client is not checked."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body as ASGI's `send` would; only between the start and the end of a response.

        A body without Content-Length is sent in chunks (RFC 9112, section 7.1).
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def refuse(self, error: ApiError) -> None:
        """Answer a malformed request, after the requests before it, and close the connection."""
        broken = self.cycle if self._in_body else None
        self._discarding = True
        if broken is not None and broken in self._queued:
            self._queued.remove(broken)
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()
        last = self._queued[-1] if self._queued else self._current
        if last is not None and last is not broken and not last.response_complete:
            last.keep_alive = False  # closes the connection after its response
            return
        if broken is None or not broken.response_started:
            self.transport.write(self._error_response(error, broken))
        if broken is not None:
            broken.disconnected = True
            broken.message_event.set()
        self._linger()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse(_framing_error(error, data))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer what a half-closed client has sent; None closes the connection.

        Nothing distinguishes a client that only shuts down its side from one that closes the connection, except how
        its kernel answers when something is sent: see _probe.
        """
        if self._discarding or self.transport.is_closing():
            return None
        if self._in_message:
            self.refuse(ApiError(400, "the connection was closed in the middle of the request; send the whole request"))
        answered = self._answered()
        if answered is None or self.scheme == "https":  # TLS has no half-closed connections
            return None
        (self._queued[-1] if self._queued else answered).keep_alive = False
        self._begin_checks()
        return True

    def check_paused(self) -> None:
        """Begin to check a client that has shut down or closed the connection while reading is paused.

        Called periodically. Reading is paused while requests wait for the response to an earlier one.
        """
        if not (self.flow.read_paused and has_shut_down(self.transport)):
            return
        if self.scheme == "https":  # TLS has no half-closed connections
            self.transport.abort()
        else:
            self._begin_checks()

    def on_message_begin(self) -> None:
        if not self._repeating_head:
            self._in_message = True
            super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeating_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeating_head:
            return
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise ApiError(400, "the server speaks HTTP/1.1 and HTTP/1.0; send the request in one of them")
        if httptools.parse_url(self.url).path is None:
            raise ApiError(400, INVALID_TARGET)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._in_body = True
            self._queued.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser ends the message at its head: _replace_parser
            return
        self._in_message = self._in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # notifies only the request that came last
        for cycle in self._queued if self._current is None else (*self._queued, self._current):
            cycle.disconnected = True
            cycle.message_event.set()
        for timer in (self._timer, self._next_check):
            if timer is not None:
                timer.cancel()

    def _parse(self, data: bytes) -> None:
        """Parse what the client has sent. Ignores offers of another protocol: Java's client, for one, offers HTTP/2."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._replace_parser()

    def _replace_parser(self) -> None:
        """Continue after a head with a parser that knows how the body is framed, but not the head's offer to upgrade.

        The old parser would read what follows the head as the other protocol.
        """
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        head = [b"POST / HTTP/1.1", *(b"%b: %b" % header for header in framing), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self._repeating_head = True
        self.parser.feed_data(b"\r\n".join(head))
        self._repeating_head = False

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for the next request."""
        if not self._queued or self._queued[0].scope is not scope:  # refused before its turn
            return
        cycle = self._current = self._queued.popleft()
        self._streams_events = plain = False

        async def send_message(message: Message) -> None:
            nonlocal plain
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                if cycle.more_body and b"connection" not in headers and _unread_bytes(cycle) > UNREAD_BODY:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
                self._streams_events = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
                plain = scope["http_version"] == "1.0" and b"content-length" not in headers
                if plain:
                    cycle.chunked_encoding = self.chunked = False
            elif plain:
                cycle.expected_content_length = len(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body") and self._must_linger(cycle):
                cycle.keep_alive = True  # else uvicorn closes the connection
                await send(message)
                self._linger()
            else:
                await send(message)

        await self._application(scope, receive, send_message)

    def _must_linger(self, cycle: RequestResponseCycle) -> bool:
        """Whether the connection of `cycle` must be closed while the client is still sending."""
        return cycle.more_body and not cycle.keep_alive and not self._discarding

    def _linger(self) -> None:
        """Close the connection when the client has closed it, or after LINGER_SECONDS."""
        self._discarding = True
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _is_answering(self) -> bool:
        """Whether a response is still to be sent."""
        return self._answered() is not None

    def _answered(self) -> RequestResponseCycle | None:
        """The request being answered, else the next one; None if no response is still to be sent."""
        current = self._current
        if current is None or current.response_complete or current.disconnected:
            return self._queued[0] if self._queued else None
        return current

    def _begin_checks(self) -> None:
        """Begin to check whether a half-closed client has left, if that has not begun."""
        if self._next_check is None:
            enable_keepalive(self.transport)
            self._check_client(MIN_CHECK)

    def _check_client(self, seconds: float) -> None:
        """Close the connection once a half-closed client has left; checks again after `seconds`."""
        self._next_check = None
        answered = self._answered()
        if self.transport.is_closing() or answered is None:
            return
        if has_hung_up(self.transport):
            self.transport.abort()
            return
        self._probe(answered)
        self._next_check = self.loop.call_later(seconds, self._check_client, min(2 * seconds, MAX_CHECK))

    def _probe(self, answered: RequestResponseCycle) -> None:
        """Send what clients ignore, which a reset answers if the client has closed the connection.

        Nothing can be sent before a response by HTTP/1.0, for which TCP keepalive remains, nor within a JSON body,
        whose parts follow each other immediately.
        """
        if not answered.response_started:
            if answered.scope["http_version"] == "1.1":
                self.transport.write(CONTINUE)
        elif self._streams_events and not self.transport.get_write_buffer_size():
            self.write_chunk(COMMENT)

    def _error_response(self, error: ApiError, broken: RequestResponseCycle | None) -> bytes:
        """A whole response, for a request that the application does not answer.

        broken: the request, if its head was complete; the shape of its errors is known once the application has it.
        """
        state = {} if broken is None else broken.scope["state"]
        ids: RequestIds = state.setdefault(REQUEST_IDS, RequestIds())
        body = msgspec.json.encode(body_of(error, state))
        client = f"{self.client[0]}:{self.client[1]}" if self.client else ""
        access_log.write(
            access_log.Access(
                client=client, method="", target="", status=error.status, seconds=0.0, request_id=ids.known().decode()
            )
        )
        headers = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *ids.headers(),
        ]
        status = HTTPStatus(error.status)
        lines = [b"HTTP/1.1 %d %b" % (status, status.phrase.encode()), *(b"%b: %b" % header for header in headers)]
        return b"\r\n".join([*lines, b"", body])


def _framing_error(error: httptools.HttpParserError, data: bytes) -> ApiError:
    """The refusal of bytes that are not a request."""
    if isinstance(error.__context__, ApiError):  # raised by a callback of the parser
        return error.__context__
    if data.startswith(TLS_HANDSHAKE):
        return ApiError(400, "the client speaks TLS, but this port speaks plain HTTP; use http://, or serve with TLS")
    invalid_url = httptools.HttpParserInvalidURLError
    if isinstance(error, invalid_url) or isinstance(error.__context__, invalid_url):
        return ApiError(400, INVALID_TARGET)
    if isinstance(error, httptools.HttpParserCallbackError):
        log.error("a callback of the HTTP parser failed", exc_info=error.__context__)
        return ApiError(500, "internal server error; see the server's log")
    return ApiError(400, f"the request is not valid HTTP/1.1: {error}")


def _unread_bytes(cycle: RequestResponseCycle) -> float:
    """Upper bound of the bytes that the client has yet to send."""
    lengths = [value for name, value in cycle.scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths else float("inf")
