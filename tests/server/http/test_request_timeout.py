"""server.request_timeout of a real server with the fake engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def server(serve_fake: Serve) -> Iterator[Any]:
    with serve_fake(request_timeout=1.0) as running:
        yield running
        assert running.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_longer_than_request_timeout_fails(server: Any, gate: Any, stream: bool) -> None:
    body = COMPLETION | {"prompt": gate.prompt, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    if response.status_code == 200:
        assert stream
        error = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "request_timeout"
    assert "server.request_timeout" in error["message"]
    server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)
    server.until(lambda: httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30).status_code == 200)


def test_request_timeout_covers_the_time_in_which_the_body_arrives(server: Any) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 504 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"
