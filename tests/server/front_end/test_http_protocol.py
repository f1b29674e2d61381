"""What a real server does with clients that speak HTTP in unusual ways, over plain sockets."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
END = {"1.0": b"\n\n", "1.1": b"\n\n\r\n"}
"""How an event ends, with its chunk, by version of HTTP."""
ABORTED = 'engine_requests_finished_total{finish_reason="abort"}'


def connect(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def post(body: Any, *headers: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(head).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection; fails when the connection is reset."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def read_response(connection: socket.socket) -> bytes:
    """One response with a Content-Length, in however many parts it arrives."""
    received = b""
    while not (response := re.match(rb"(?is).*?\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n", received)) or (
        len(received) < response.end() + int(response[1])
    ):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def ask(server: Any, data: bytes, *, shut_down: bool = False) -> bytes:
    """Send bytes and return everything the server sends until the server closes the connection."""
    with connect(server) as connection:
        connection.sendall(data)
        if shut_down:
            connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Everything up to `end`, which must be the last that has been sent."""
    received = b""
    while not received.endswith(end):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def joined(chunks: bytes) -> bytes:
    """The body that is sent in these chunks."""
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        body, chunks = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def texts(events: Iterable[str]) -> list[str]:
    """The texts of the events of a completion."""
    found = (event.removeprefix("data: ") for event in events)
    return [json.loads(event)["choices"][0]["text"] for event in found if event not in ("", "[DONE]")]


def parse(response: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the last response."""
    while response.startswith(b"HTTP/1.1 100 "):
        response = response.partition(b"\r\n\r\n")[2]
    head, _, body = response.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nA b: c\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: a\n\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_bytes_that_are_not_a_request_get_an_error_in_openais_shape(server: Any, data: bytes) -> None:
    status, headers, body = parse(ask(server, data))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_a_tls_client_is_told_that_the_port_is_plain(server: Any) -> None:
    assert "http://" in json.loads(parse(ask(server, b"\x16\x03\x01\x02\x00\x01"))[2])["error"]["message"]


@pytest.mark.parametrize("cut", [b"GET /hea", CHUNKED, CHUNKED + b"3\r\nab", post(COMPLETION)[:-1]])
def test_a_request_that_ends_in_the_middle_gets_an_error(server: Any, cut: bytes) -> None:
    status, _, body = parse(ask(server, cut, shut_down=True))
    assert status == 400
    assert "middle of the request" in json.loads(body)["error"]["message"]


def test_garbage_after_a_request_does_not_break_into_its_response(server: Any) -> None:
    stream = post(COMPLETION | {"stream": True, "max_tokens": 50})
    with connect(server) as connection:
        connection.sendall(stream)
        received = connection.recv(1000)
        connection.sendall(b"garbage\r\n\r\n")
        received += read_all(connection)
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_requests_before_a_malformed_one_are_answered(server: Any) -> None:
    received = ask(server, post(COMPLETION) + post(COMPLETION) + b"garbage\r\n\r\n")
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b'"text":"abcd"') == 2


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    first, last = post(COMPLETION | {"max_tokens": 2}), post(COMPLETION | {"max_tokens": 3}, "Connection: close")
    received = ask(server, first + last)
    assert received.index(b'"text":"ab"') < received.index(b'"text":"abc"')


def test_a_stream_to_an_http_1_0_client_is_not_chunked(server: Any) -> None:
    body = COMPLETION | {"stream": True, "max_tokens": 50}
    status, headers, plain = parse(ask(server, post(body, version="1.0")))
    assert status == 200
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    events = plain.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    whole = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": False}, timeout=30).json()
    assert "".join(texts) == whole["choices"][0]["text"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_the_whole_response(server: Any, stream: bool, version: str) -> None:
    asked = post(COMPLETION | {"stream": stream, "max_tokens": 100}, version=version)
    status, headers, body = parse(ask(server, asked, shut_down=True))
    assert status == 200
    assert headers["connection"] == "close"
    assert body.endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == "1.1" else b"") if stream else b"}")


def test_interim_responses_come_between_the_responses_of_a_half_closed_client(server: Any) -> None:
    stream = post(COMPLETION | {"stream": True, "max_tokens": 100})
    received = ask(server, stream + stream, shut_down=True)
    interim = rb"(HTTP/1\.1 100 Continue\r\n\r\n)*"
    response = rb"HTTP/1\.1 200 OK\r\n((?!HTTP/1).)*data: \[DONE\]\n\n\r\n0\r\n\r\n"
    assert re.fullmatch(interim + response + interim + response, received, re.DOTALL)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_the_connection_is_told_from_a_half_closed_one(
    server: Any, gate: Any, stream: bool
) -> None:
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt, "stream": stream, "n": 8}))
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 8)
        if stream:
            connection.recv(1000)
    server.until(lambda: server.metrics()[ABORTED] == aborted + 8)


def test_a_client_that_leaves_frees_all_its_pipelined_requests(server: Any, gate: Any) -> None:
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt, "n": 8}) + post(COMPLETION))
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 8)
    server.until(lambda: server.metrics()[ABORTED] == aborted + 8)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_read_all_events_frees_its_request_when_it_leaves(
    server: Any, gate: Any, version: str
) -> None:
    """Closing a connection resets it only if something was unread; otherwise the client seems half-closed."""
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt, "stream": True}, version=version))
        read_until(connection, END[version])
    server.until(lambda: server.metrics()[ABORTED] == aborted + 1)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_gets_comments_between_the_events_of_a_held_stream(
    server: Any, gate: Any, version: str
) -> None:
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt, "stream": True}, version=version))
        received = read_until(connection, END[version])
        connection.shutdown(socket.SHUT_WR)
        received += read_until(connection, b":" + END[version])
        gate.open()
        received += read_all(connection)
    _, _, body = parse(received)
    events = (joined(body) if version == "1.1" else body).decode().split("\n\n")
    assert ":" in events
    assert "".join(texts(event for event in events if event != ":")) == "abcd"
    assert events[-2:] == ["data: [DONE]", ""]


def test_a_client_of_http_1_0_that_leaves_before_the_response_frees_its_request(server: Any, gate: Any) -> None:
    """The server can send it nothing. Its kernel answers a keepalive probe when the connection is forgotten: in 1 s."""
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt}, version="1.0"))
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 1)
    server.until(lambda: server.metrics()[ABORTED] == aborted + 1)


@pytest.mark.parametrize("size", [0, 90_000], ids=["small", "large"])
def test_a_client_that_leaves_with_a_request_unread_frees_the_one_before(server: Any, gate: Any, size: int) -> None:
    """Reading is paused when a second request arrives during the first, so the end of the connection is not read."""
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt}))
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 1)
        connection.sendall(post(COMPLETION | {"user": "x" * size}))
    server.until(lambda: server.metrics()[ABORTED] == aborted + 1)


def test_a_half_closed_client_that_leaves_later_frees_its_requests(server: Any, gate: Any) -> None:
    aborted = server.metrics()[ABORTED]
    with connect(server) as connection:
        connection.sendall(post(COMPLETION | {"prompt": gate.prompt, "n": 8}))
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 8)
        connection.shutdown(socket.SHUT_WR)
        read_until(connection, b"HTTP/1.1 100 Continue\r\n\r\n")  # the server has seen the one before the other
    server.until(lambda: server.metrics()[ABORTED] == aborted + 8)


def test_a_client_that_is_still_sending_receives_the_413(server: Any) -> None:
    size = 20 * 2**20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
    with connect(server) as connection:
        connection.sendall(head)
        for _ in range(size // 2**20):  # a reset connection would fail here, or below
            connection.sendall(b"x" * 2**20)
            time.sleep(0.005)
        status, headers, body = parse(read_all(connection))
    assert status == 413
    assert headers["connection"] == "close"
    assert "server.max_body_bytes" in json.loads(body)["error"]["message"]


def test_a_refused_upload_of_unknown_length_ends_with_the_refusal(server: Any) -> None:
    with connect(server) as connection:
        connection.sendall(CHUNKED.replace(b"/v1/completions", b"/nowhere"))
        for _ in range(100):
            connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        status, headers, _ = parse(read_all(connection))
    assert (status, headers["connection"]) == (404, "close")


def test_a_small_unread_body_keeps_the_connection(server: Any) -> None:
    with connect(server) as connection:
        head, _, body = post(COMPLETION, path="/nowhere").partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert read_response(connection).startswith(b"HTTP/1.1 404")
        connection.sendall(body + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_failure_says_that_the_connection_closes(serve_fake: Serve) -> None:
    with serve_fake() as own, connect(own) as connection:
        connection.sendall(post({"prompt": "break the tokenizer"}, path="/tokenize"))
        status, headers, body = parse(read_all(connection))
    assert (status, headers["connection"]) == (500, "close")
    assert json.loads(body)["error"]["type"] == "server_error"


@pytest.mark.parametrize("split", [0, 1, 20, 1000])
def test_an_upgrade_to_http_2_is_ignored(server: Any, split: int) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    asked = post(COMPLETION, *upgrade)
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(asked[: max(0, len(asked) - split)])
        time.sleep(0.05)  # so that the server mostly reads the parts separately
        connection.sendall(asked[max(0, len(asked) - split) :] + get + post(COMPLETION, "Connection: close"))
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.count(b'"text":"abcd"') == 2
