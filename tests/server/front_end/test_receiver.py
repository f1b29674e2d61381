"""More connections than a front end has room or file descriptors for, against a real server with the fake engine."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
STREAM = json.dumps(COMPLETION | {"max_tokens": 250, "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
DROPPED = 'engine_connections_dropped_total{reason="%s"}'


def connect(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_healthy(server: Any) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask_health(connection: socket.socket) -> None:
    connection.sendall(HEALTH)
    data = b""
    while not data.endswith(b'{"status":"ok"}'):
        data += connection.recv(1000)
    assert data.startswith(b"HTTP/1.1 200")


def open_stream(server: Any) -> socket.socket:
    """A connection whose request is being answered."""
    connection = connect(server)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


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
            time.sleep(2)  # idle connections make room after a second
            assert is_healthy(server)
            assert httpx.post(f"{server.url}/v1/completions", json=COMPLETION).status_code == 200
        server.until(lambda: server.metrics()["engine_connections"] == 1)
        assert is_healthy(server)
        (pid,) = server.front_end_pids()
        assert len(os.listdir(f"/proc/{pid}/fd")) < 64
        assert server.stop() == 0


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit(serve_fake: Serve) -> None:
    with serve_fake() as server:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for pid in [server.process.pid, *server.front_end_pids()]:
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == min(hard, 2**20)


def test_a_server_without_room_for_a_connection_says_so_at_start(serve_fake: Serve) -> None:
    with serve_fake(descriptors=40) as server:
        assert server.process.returncode == 1
        assert "the limit of open files (ulimit -n) is 40; the server needs at least" in server.errors


def test_a_connection_above_the_limit_is_answered_with_503_while_all_are_busy(serve_fake: Serve) -> None:
    with serve_fake(max_connections=3, options={"delay": 0.02}) as server, ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(open_stream(server))
        response = httpx.post(f"{server.url}/v1/completions", json=COMPLETION)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "too_many_connections"
        streams.close()
        server.until(lambda: is_healthy(server))
        assert server.metrics()[DROPPED % "refused"] >= 1
        assert server.errors.count("refused connections: ") == 1


def test_the_connection_that_was_idle_longest_makes_room(serve_fake: Serve) -> None:
    with serve_fake(max_connections=3) as server:
        with ExitStack() as stack:
            idle = [stack.enter_context(connect(server)) for _ in range(3)]
            for connection in (*idle, idle[0]):
                ask_health(connection)
            time.sleep(1.1)
            assert is_healthy(server)
            assert idle[1].recv(1000) == b""
            ask_health(idle[0])
            ask_health(idle[2])
        server.until(lambda: server.metrics()[DROPPED % "evicted"] == 1)
        assert server.errors == ""


def test_connections_lost_for_want_of_descriptors_are_counted_and_later_ones_are_served(serve_fake: Serve) -> None:
    with serve_fake() as server:
        (pid,) = server.front_end_pids()
        limits = limit_descriptors(pid, 2)
        with ExitStack() as stack:
            connections = [stack.enter_context(connect(server)) for _ in range(8)]
            ends = 0
            for connection in connections:
                connection.settimeout(1)
                try:
                    ends += connection.recv(1) == b""
                except TimeoutError:
                    continue
            assert ends >= 6
        server.until(lambda: is_healthy(server))
        assert server.metrics()[DROPPED % "lost"] >= ends
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert server.front_end_pids() == [pid]
        assert server.errors.count("ulimit -n") == 1
        assert server.stop() == 0


def test_the_supervisor_accepts_again_when_descriptors_are_free_again(serve_fake: Serve) -> None:
    with serve_fake() as server:
        pid = server.process.pid
        limits = limit_descriptors(pid, 0)
        with connect(server) as waiting:
            waiting.sendall(HEALTH)
            ticks = os.sysconf("SC_CLK_TCK")
            before = sum(os_times(pid))
            time.sleep(1)
            assert (sum(os_times(pid)) - before) / ticks < 0.5  # it does not spin
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            assert waiting.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.errors.count("failed attempts to accept a connection") == 1
        assert server.stop() == 0


def os_times(pid: int) -> list[int]:
    """User and system time of a process, clock ticks."""
    with open(f"/proc/{pid}/stat") as stat:
        return [int(field) for field in stat.read().rpartition(")")[2].split()[11:13]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_front_end_is_replaced(serve_fake: Serve, workers: int, alive: Callable[[int], bool]) -> None:
    with serve_fake(api_workers=workers, front_end_timeout=2.0) as server:
        stopped, *others = server.front_end_pids()
        os.kill(stopped, signal.SIGSTOP)
        server.until(lambda: not alive(stopped), 15)
        server.until(lambda: len(server.front_end_pids()) == workers, 15)
        server.until(lambda: is_healthy(server), 15)
        assert set(others) < set(server.front_end_pids())
        assert "answered nothing for 2 s (server.front_end_timeout)" in server.errors
        assert server.stop() == 0


def test_a_stopped_and_continued_server_replaces_no_front_end(serve_fake: Serve) -> None:
    with serve_fake(front_end_timeout=2.0) as server:
        pids = server.front_end_pids()
        everyone = [server.process.pid, *server.children()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        assert is_healthy(server)
        time.sleep(1)
        assert server.front_end_pids() == pids
        assert server.errors == ""
