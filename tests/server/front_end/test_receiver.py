"""More connections than a front end has room or file descriptors for, against a real server with the fake engine."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
DROPPED = 'engine_connections_dropped_total{reason="%s"}'


def connect(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_served(server: Any) -> bool:
    """Whether a new connection gets a completion."""
    try:
        return httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def ask(connection: socket.socket, path: str = "/health") -> str:
    """The body of the answer, after which the connection stays open."""
    connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
    head, _, body = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = int(re.findall(rb"(?i)\r\ncontent-length: (\d+)", head)[0])
    while len(body) < length:
        body += connection.recv(length - len(body))
    return body.decode()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        part = connection.recv(1000)
        assert part, data
        data += part
    return data


def connect_alone(server: Any) -> socket.socket:
    """The only connection of the server's."""
    connection = connect(server)
    only = re.compile(r"^engine_connections{[^}]*} 1.0$", re.MULTILINE)
    server.until(lambda: only.search(ask(connection, "/metrics")) is not None)
    return connection


def begin_stream(connection: socket.socket, prompt: str) -> None:
    """Ask for a stream and wait until it has begun."""
    body = json.dumps(COMPLETION | {"prompt": prompt, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)
    assert read_until(connection, b"\ndata: ").startswith(b"HTTP/1.1 200 ")


def limit_descriptors(pid: int, spare: int) -> tuple[int, int]:
    """Leave a process `spare` free file descriptors; the former limits."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(len(used) + spare + 1) if number not in used]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], limits[1]))
    return limits


def test_a_server_with_few_descriptors_answers_during_and_after_a_flood_of_connections(serve_fake: Serve) -> None:
    with serve_fake(descriptors=96) as server:
        assert "server.max_connections" in server.errors  # fewer connections than the setting allows
        with ExitStack() as flood:
            for _ in range(300):
                flood.enter_context(connect(server))
            server.until(lambda: is_served(server))  # idle connections make room after a second
        server.until(lambda: server.metrics()["engine_connections"] == 1)
        assert is_served(server)
        (pid,) = server.front_end_pids()
        assert len(os.listdir(f"/proc/{pid}/fd")) < 64
        assert server.stop() == 0


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit(server: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for pid in [server.process.pid, *server.front_end_pids()]:
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == min(hard, 2**20)


def test_a_server_without_room_for_a_connection_says_so_at_start(serve_fake: Serve) -> None:
    with serve_fake(descriptors=40) as server:
        assert server.process.returncode == 1
        assert "the limit of open files (ulimit -n) is 40; the server needs at least" in server.errors


@pytest.fixture(scope="module")
def three_connections(serve_fake: Serve) -> Iterator[Any]:
    """A server that serves 3 connections."""
    with serve_fake(max_connections=3) as server:
        yield server
        assert server.stop() == 0
        assert server.errors.count("refused connections: ") == len(server.errors.splitlines())  # nothing else


def test_a_connection_above_the_limit_is_answered_with_503_while_all_are_busy(
    three_connections: Any, gate: Any
) -> None:
    server = three_connections
    with ExitStack() as streams:
        first = streams.enter_context(connect_alone(server))
        for connection in (first, *(streams.enter_context(connect(server)) for _ in range(2))):
            begin_stream(connection, gate.prompt)
        response = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "too_many_connections"
    server.until(lambda: is_served(server))
    assert server.metrics()[DROPPED % "refused"] >= 1
    assert server.errors.count("refused connections: ") == 1


def test_the_connection_that_was_idle_longest_makes_room(three_connections: Any) -> None:
    server = three_connections
    before = server.metrics()[DROPPED % "evicted"]
    with ExitStack() as stack:
        first = stack.enter_context(connect_alone(server))
        second, third = (stack.enter_context(connect(server)) for _ in range(2))
        for connection in (second, third, first):
            ask(connection)
        server.until(lambda: is_served(server))  # refused until the others have been idle for a second
        assert second.recv(1000) == b""
        ask(first)
        ask(third)
    server.until(lambda: server.metrics()[DROPPED % "evicted"] == before + 1)


@pytest.fixture(scope="module")
def few_descriptors(serve_fake: Serve) -> Iterator[Any]:
    """A server of whose processes tests take the descriptors."""
    with serve_fake() as server:
        (pid,) = server.front_end_pids()
        yield server
        assert server.front_end_pids() == [pid]
        assert server.stop() == 0


def test_connections_lost_for_want_of_descriptors_are_counted_and_later_ones_are_served(few_descriptors: Any) -> None:
    server = few_descriptors
    (pid,) = server.front_end_pids()
    limits = limit_descriptors(pid, 2)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(8)]
        ended: list[Any] = []
        while len(ended) < 6:
            ended = select.select(connections, [], [], 30)[0]
            assert ended, "connections are open that the front end has no descriptor for"
            assert all(connection.recv(1, socket.MSG_PEEK) == b"" for connection in ended)
    server.until(lambda: is_served(server))
    assert server.metrics()[DROPPED % "lost"] >= 6
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert server.errors.count("ulimit -n") == 1


def test_the_supervisor_accepts_again_when_descriptors_are_free_again(few_descriptors: Any) -> None:
    server = few_descriptors
    pid = server.process.pid
    limits = limit_descriptors(pid, 0)
    with connect(server) as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ticks = os.sysconf("SC_CLK_TCK")
        before = sum(os_times(pid))
        time.sleep(1)
        assert (sum(os_times(pid)) - before) / ticks < 0.5  # it does not spin
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert read_until(waiting, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert server.errors.count("failed attempts to accept a connection") == 1


def os_times(pid: int) -> list[int]:
    """User and system time of a process, clock ticks."""
    with open(f"/proc/{pid}/stat") as stat:
        return [int(field) for field in stat.read().rpartition(")")[2].split()[11:13]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_front_end_is_replaced_but_not_those_of_a_stopped_server(
    serve_fake: Serve, workers: int, alive: Callable[[int], bool]
) -> None:
    with serve_fake(api_workers=workers, front_end_timeout=3.0) as server:
        stopped, *others = pids = server.front_end_pids()
        everyone = [server.process.pid, *server.children()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        assert is_served(server)
        time.sleep(1)
        assert server.front_end_pids() == pids
        assert server.errors == ""
        os.kill(stopped, signal.SIGSTOP)
        server.until(lambda: not alive(stopped))
        server.until(lambda: len(server.front_end_pids()) == workers)
        server.until(lambda: is_served(server))
        assert set(others) < set(server.front_end_pids())
        assert "answered nothing for 3 s (server.front_end_timeout)" in server.errors
        assert server.stop() == 0
