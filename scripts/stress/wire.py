"""Raw HTTP/1.1 over a socket: sends exactly the given bytes, in parts, and hangs up where it should."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.server.shared.authority import authority

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_KEPT = 1 << 20
"""Bytes of an answer that are kept; the rest is read and counted only."""
STREAM_MARK = b"data: "

Part = bytes | float
"""Bytes to send, or seconds to wait."""


class UsageError(Exception):
    """The arguments cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Target:
    """The server under test, at a loopback address only: the requests are meant to do harm."""

    host: str
    port: int
    key: str = ""
    """API key; empty: none."""
    model: str = ""
    """Name of the served model."""
    max_len: int = 0
    """Context length of the model, tokens."""

    @classmethod
    def at(cls, url: str, key: str = "") -> Target:
        """The server at an address. Raises UsageError unless the address is a loopback one and a server answers."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or parts.hostname not in LOOPBACK or not parts.port:
            raise UsageError(f"{url!r} is not the address of a local server; write it as http://127.0.0.1:8000")
        bare = cls(parts.hostname or "", parts.port, key)
        answer = exchange(bare, bare.get("/v1/models"), timeout=30)
        if answer.status != 200:
            raise UsageError(f"{url} does not name its model ({answer}); is the server up, and --api-key right?")
        model = answer.json()["data"][0]
        return cls(bare.host, bare.port, key, model["id"], int(model["max_model_len"]))

    @property
    def url(self) -> str:
        return f"http://{authority(self.host, self.port)}"

    def get(self, path: str, **headers: str) -> bytes:
        """A GET request as bytes."""
        return self.request("GET", path, b"", headers)

    def post(self, path: str, body: Any, **headers: str) -> bytes:
        """A POST request as bytes. body: bytes, or an object to send as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        return self.request("POST", path, data, headers)

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A well-formed request as bytes; a header named with _ is sent with -, and an empty value leaves one out."""
        lines = {"Host": authority(self.host, self.port), "Content-Length": str(len(body)) if body else ""}
        if body:
            lines["Content-Type"] = "application/json"
        if self.key:
            lines["Authorization"] = f"Bearer {self.key}"
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body

    def connect(self, timeout: float) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout)


@dataclass
class Answer:
    """What came back. status 0: the server closed without an answer; -1: nothing came in time."""

    status: int = 0
    head: bytes = b""
    body: bytes = b""
    size: int = 0
    """Bytes of head and body."""
    seconds: float = 0.0
    """Until the answer was complete, or was given up."""

    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        words = {0: "closed without an answer", -1: "no answer in time"}.get(self.status, f"status {self.status}")
        return f"{words} after {self.seconds:.2f} s: {self.body[:200].decode(errors='replace')}".rstrip(": ")


@dataclass(frozen=True)
class Manners:
    """How a client behaves after its last byte."""

    read: str = "all"
    """all: until the answer is complete; none: hang up immediately; some: hang up after `after` bytes; stall: read
    nothing for `after` seconds, then hang up."""
    after: float = 0
    close: str = "plain"
    """plain: FIN; reset: RST."""
    half_close: bool = False
    """Shut the sending side down before reading."""


POLITE = Manners()


@dataclass
class _Reader:
    """Recognizes the end of one HTTP/1.1 answer."""

    head: bytes | None = None
    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    left: int | None = None
    chunked: bool = False
    status: int = 0
    tail: bytes = b""

    def feed(self, received: bytes) -> bool:
        """Take bytes; returns whether the answer is complete."""
        self.size += len(received)
        if self.head is None:
            self.data += received
            head, blank, rest = bytes(self.data).partition(b"\r\n\r\n")
            if not blank:
                return False
            match = re.match(rb"HTTP/1\.[01] (\d{3})", head)
            if match is not None and match[1] in (b"100", b"103"):
                self.data = bytearray(rest)
                return bool(rest) and self.feed(b"")
            self.head, self.data, received = head, bytearray(), rest
            self.status = int(match[1]) if match else 599  # not HTTP
            length = re.search(rb"\r\ncontent-length:\s*(\d+)", head.lower())
            self.chunked = b"transfer-encoding: chunked" in head.lower()
            self.left = int(length[1]) if length else 0 if self.status in (204, 304) else None
        if len(self.data) < MAX_KEPT:
            self.data += received
        self.tail = (self.tail + received)[-8:]
        if self.chunked:
            return self.tail.endswith(b"0\r\n\r\n")
        if self.left is None:
            return False  # until the server closes
        self.left -= len(received)
        return self.left <= 0

    def answer(self, seconds: float) -> Answer:
        body = bytes(self.data)
        return Answer(self.status, self.head or b"", unchunk(body) if self.chunked else body, self.size, seconds)


def exchange(
    target: Target, *parts: Part, manners: Manners = POLITE, timeout: float = 10.0, head_only: bool = False
) -> Answer:
    """Send the parts on a connection of its own and return the first answer. head_only: the answer has no body."""
    start = time.monotonic()
    reader = _Reader()
    try:
        with target.connect(timeout) as connection:
            connection.settimeout(timeout)
            if manners.close == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            _send(connection, parts)
            if manners.half_close:
                connection.shutdown(socket.SHUT_WR)
            if manners.read == "stall":
                time.sleep(manners.after)
            if manners.read in ("all", "some"):
                limit = manners.after if manners.read == "some" else float("inf")
                deadline = start + timeout
                while reader.size < limit and (received := connection.recv(1 << 16)):
                    if reader.feed(received) or (head_only and reader.head is not None):
                        break
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    except TimeoutError:
        if reader.status == 0:
            return Answer(-1, seconds=time.monotonic() - start)
    except OSError:
        pass  # reset by the server, after or without an answer
    return reader.answer(time.monotonic() - start)


def _send(connection: socket.socket, parts: tuple[Part, ...]) -> None:
    """Send all parts. A server may answer and close before it has read everything; then the rest stays unsent."""
    for part in parts:
        if isinstance(part, bytes):
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                return
        else:
            time.sleep(part)


def unchunk(body: bytes) -> bytes:
    """The content of a chunked body, as far as it goes."""
    found, place = bytearray(), 0
    while match := re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n").match(body, place):
        size = int(match[1], 16)
        found += body[match.end() : match.end() + size]
        place = match.end() + size + 2
        if not size:
            break
    return bytes(found)


def stream(target: Target, body: Mapping[str, Any], timeout: float) -> Iterator[tuple[float, int]]:
    """(time, events so far) at each read of a streamed completion. Raises OSError when it is refused or breaks."""
    with target.connect(timeout) as connection:
        connection.settimeout(timeout)
        connection.sendall(target.post("/v1/completions", {"model": target.model, "stream": True, **body}))
        reader, events = _Reader(), 0
        while received := connection.recv(1 << 16):
            done = reader.feed(received)
            if reader.head is not None and reader.status != 200:
                raise ConnectionRefusedError(f"the stream was refused: {reader.answer(0.0)}")
            events += received.count(STREAM_MARK)
            yield time.monotonic(), events
            if done:
                return
        raise ConnectionResetError("the stream broke off")


def metrics(target: Target) -> dict[str, float]:
    """The samples of /metrics; keys are names with labels. Raises UsageError when they do not come."""
    answer = exchange(target, target.get("/metrics"), timeout=30)
    if answer.status != 200:
        raise UsageError(f"/metrics: {answer}")
    pairs = (line.rpartition(" ") for line in answer.body.decode().splitlines() if line[:1] not in ("#", ""))
    return {name: float(value) for name, _, value in pairs}


def used_blocks(target: Target) -> float:
    """KV blocks that requests hold, of all replicas."""
    samples = metrics(target).items()
    return sum(value for name, value in samples if name.startswith("engine_kv_blocks{") and 'state="used"' in name)


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Wait until the condition holds, at most `seconds`; whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
