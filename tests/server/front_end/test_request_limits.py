"""Limits of size and time on what a client sends and reads, against a real server with the fake engine."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
KEY = b"Authorization: Bearer k\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n"
GET_MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
MODELS = GET_MODELS + KEY + b"\r\n"


@pytest.fixture(scope="module")
def server(serve_fake: Serve) -> Iterator[Any]:
    """A server with a key, so that what it answers without one is answered before the key is checked."""
    limits = {"header_timeout": 2.0, "body_timeout": 2.0, "keep_alive_timeout": 2.0, "write_timeout": 2.0}
    with serve_fake(api_key=("k",), max_waiting=1024, options={"delay": 0.02}, **limits) as running:
        yield running
        assert running.stop() == 0
        assert running.errors == ""


def connect(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def answer(server: Any, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
        return read_to_end(connection)


def refusal(data: bytes, status: int) -> Any:
    """The error object of the only response in `data`."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status, data[:300]
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def sample(server: Any, name: str) -> float:
    found: float = server.metrics(headers={"authorization": "Bearer k"})[name]
    return found


def dropped(server: Any, reason: str) -> float:
    return sample(server, f'engine_connections_dropped_total{{reason="{reason}"}}')


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([GET_MODELS, b"x: ", b"y" * 2**21], 431),
        ([GET_MODELS, b"x: ", b"y" * 70_000, b"\r\n\r\n"], 431),
        ([GET_MODELS, b"y" * 2**21], 431),
        ([GET_MODELS, b"".join(b"x%d: %b\r\n" % (i, b"y" * 1000) for i in range(70)), b"\r\n"], 431),
        ([GET_MODELS, b"x: y\r\n" * 200_000], 431),
        ([GET_MODELS, b"x: y\r\n" * 100, b"\r\n"], 431),
        ([b"GET /", b"y" * 2**21], 414),
        ([b"GET /", b"y" * 70_000, b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], 414),
        ([b"\r\n" * 2**20], 431),
        ([CHUNKED, b"0\r\n", b"x: y\r\n" * 200_000], 431),
        ([CHUNKED, b"0\r\nx: ", b"y" * 2**21], 431),
        ([CHUNKED, b"1;x=", b"y" * 2**21], 431),
        ([CHUNKED, b"1;x=yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n \r\n" * 2**15], 431),
    ],
    ids=[
        "endless header",
        "one large header",
        "endless name",
        "headers too large together",
        "endless headers",
        "too many headers",
        "endless URL",
        "URL too long",
        "endless blank lines",
        "endless trailers",
        "endless trailer",
        "endless chunk extension",
        "many chunk extensions",
    ],
)
def test_a_request_whose_head_or_framing_is_too_large_is_refused(server: Any, parts: list[bytes], status: int) -> None:
    before = dropped(server, "invalid")
    error = refusal(answer(server, *parts), status)
    assert "server.max_header" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert dropped(server, "invalid") == before + 1


def test_a_head_just_within_the_limits_is_accepted(server: Any) -> None:
    headers = {f"x-{index}": "y" * 600 for index in range(92)} | {"authorization": "Bearer k"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30).status_code == 200
    long = {"x": "y" * 65_000, "authorization": "Bearer k"}
    assert httpx.get(f"{server.url}/v1/models", headers=long, timeout=30).status_code == 200


def test_a_body_of_many_small_chunks_with_trailers_is_accepted(server: Any) -> None:
    body = json.dumps(COMPLETION | {"prompt": "x" * 100, "user": "y" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)  # more bytes of framing than a head may have
    data = answer(server, CHUNKED + chunks + b"0\r\n" + b"x: y\r\n" * 50 + b"\r\n")
    assert data.startswith(b"HTTP/1.1 200 ")


def test_garbage_after_a_request_does_not_tear_its_response(server: Any) -> None:
    body = json.dumps(COMPLETION | {"max_tokens": 20, "stream": True}).encode()
    data = answer(server, POST + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"garbage")
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count(b"HTTP/1.1") == 1


def test_what_is_not_http_is_refused_in_openai_shape(server: Any) -> None:
    before = dropped(server, "invalid")
    refusal(answer(server, b"hello\r\n\r\n"), 400)
    assert dropped(server, "invalid") == before + 1


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(server: Any) -> None:
    with connect(server) as connection:
        connection.sendall(MODELS * 10)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 10:
            data += connection.recv(1 << 16)
    with contextlib.suppress(ConnectionError):
        assert answer(server, MODELS * 5000).count(b"HTTP/1.1 ") < 100


def test_headers_that_take_too_long_are_answered_with_408(server: Any) -> None:
    before = dropped(server, "header_timeout")
    with connect(server) as connection:
        for byte in b"GET /" + b"x" * 95:
            connection.sendall(bytes([byte]))
            if select.select([connection], [], [], 0.1)[0]:
                break
        data = read_to_end(connection)
    assert "server.header_timeout" in refusal(data, 408)["message"]
    assert dropped(server, "header_timeout") == before + 1


def test_a_body_that_takes_too_long_is_answered_with_408(server: Any) -> None:
    before = dropped(server, "body_timeout")
    data = answer(server, POST + KEY + b"Content-Length: 100\r\n\r\n", b"{")
    assert "server.body_timeout" in refusal(data, 408)["message"]
    assert dropped(server, "body_timeout") == before + 1


def test_the_rest_of_a_refused_body_must_arrive_in_time(server: Any) -> None:
    data = answer(server, POST + b"Content-Length: 100\r\n\r\n", b"{")  # no key
    assert data.startswith(b"HTTP/1.1 401 ")
    assert data.count(b"HTTP/1.1") == 1


def test_connections_without_a_request_are_closed(server: Any) -> None:
    assert answer(server) == b""
    assert answer(server, MODELS).startswith(b"HTTP/1.1 200 ")


def test_a_long_response_outlasts_the_limits_of_the_request(server: Any) -> None:
    body = json.dumps(COMPLETION | {"max_tokens": 150, "stream": True}).encode()
    begin = time.monotonic()
    with connect(server) as connection:
        connection.sendall(POST + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
            assert data
    assert b"data: [DONE]" in data
    assert time.monotonic() - begin > 2


def test_a_client_that_stops_reading_loses_its_request(server: Any) -> None:
    before = dropped(server, "write_timeout")
    body = json.dumps(COMPLETION | {"max_tokens": 250, "stream": True, "n": 64, "prompt": ["x"] * 8}).encode()
    connection = socket.socket()
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        connection.connect((host, int(port)))
        connection.sendall(POST + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.until(lambda: dropped(server, "write_timeout") == before + 1, 30)
    server.until(lambda: sample(server, 'engine_requests_finished_total{finish_reason="abort"}') > 0)
