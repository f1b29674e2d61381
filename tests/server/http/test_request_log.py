"""Request IDs of all responses, and the access log of a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def malformed(server: Any) -> bytes:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"garbage\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_each_response_has_a_request_id(server: Any, http: httpx.Client) -> None:
    answered = http.post("/v1/completions", json=COMPLETION)
    assert answered.headers["x-request-id"] == answered.json()["id"]
    stream = http.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert stream.headers["x-request-id"] in stream.text
    failed = [http.get("/nowhere"), http.post("/v1/completions", json={})]
    for response in (*failed, http.get("/health")):
        assert re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])
    for response in (answered, stream, *failed):
        assert response.headers.get_list("request-id") == response.headers.get_list("x-request-id")
    assert re.search(rb"\r\nx-request-id: (req-[0-9a-f]{32})\r\nrequest-id: \1\r\n", malformed(server))


@pytest.mark.parametrize("body", [COMPLETION, COMPLETION | {"stream": True}, {}])
def test_a_clients_own_request_id_is_taken_over(http: httpx.Client, body: dict[str, Any]) -> None:
    for given in ("a", "trace:01-0af7651916cd43dd/b7ad+x=", "x" * 128):
        response = http.post("/v1/completions", json=body, headers={"x-request-id": given})
        assert response.headers.get_list("x-request-id") == [given]
    for unusable in ("", "x" * 129, "a b", 'a"', "é".encode()):
        response = http.post("/v1/completions", json=body, headers={"x-request-id": unusable})
        (replaced,) = response.headers.get_list("x-request-id")
        assert re.fullmatch("(req|cmpl)-[0-9a-f]{32}", replaced)


def test_the_access_log_is_off_unless_it_is_asked_for(serve_fake: Serve) -> None:
    with serve_fake() as server, server.client() as http:
        http.get("/health")
        malformed(server)
        assert server.stop() == 0
        assert server.errors == ""


def test_the_access_log_has_one_line_per_request(serve_fake: Serve) -> None:
    with serve_fake(access_log="line") as server, server.client() as http:
        http.post("/v1/completions?q=1", json=COMPLETION | {"stream": True}, headers={"x-request-id": "mine"})
        http.get('/no"where')
        http.get("/" + "x" * 10_000)
        malformed(server)
        server.until(lambda: len(server.errors.splitlines()) == 4)
        entries = server.errors.splitlines()
        (answered,) = (entry for entry in entries if entry.endswith(" mine"))
        (missing,) = (entry for entry in entries if "where" in entry)
        (long,) = (entry for entry in entries if "xxx" in entry)
        (garbage,) = (entry for entry in entries if '" " 400' in entry)
        time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} access: "
        assert re.fullmatch(time + r'127\.0\.0\.1:\d+ "POST /v1/completions\?q=1" 200 \d+\.\d{3} s mine', answered)
        assert '"GET /no%22where" 404' in missing
        assert len(long) < 400
        assert re.search(r" 400 0\.000 s req-[0-9a-f]{32}$", garbage)


def test_the_access_log_as_json_counts_clients_that_left(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(access_log="json") as server:
        before = time.monotonic()
        with server.asked(COMPLETION | {"prompt": gate.prompt}):
            server.until(lambda: server.metrics()["engine_num_requests_running"] == 1)
            time.sleep(0.2)
        server.until(lambda: "/v1/completions" in server.errors)
        (entry,) = (line for line in map(json.loads, server.errors.splitlines()) if line["method"] == "POST")
        assert set(entry) == {
            "time",
            "client",
            "method",
            "target",
            "status",
            "seconds",
            "request_id",
            "trace_id",
            "key",
        }
        assert (entry["target"], entry["status"]) == ("/v1/completions", 499)
        assert 0.2 < entry["seconds"] < time.monotonic() - before


@pytest.mark.parametrize(("level", "logged"), [("warning", True), ("error", False)])
def test_the_log_level_decides_what_is_logged(serve_fake: Serve, gate: Any, level: str, logged: bool) -> None:
    with serve_fake(log_level=level) as server, server.client() as http:
        body = COMPLETION | {"prompt": gate.prompt, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()
            server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
            gate.open()
            list(lines)
        assert server.process.wait(30) == 0
        assert ("shutting down: waiting" in server.errors) is logged


def test_json_logs_of_all_processes_share_the_ids_of_a_request(serve_fake: Serve) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "mine"}
    with serve_fake(log_format="json", access_log="json", log_level="info") as server:
        with server.client() as http:
            http.post("/v1/completions", json=COMPLETION, headers=headers)
            failed = http.post("/v1/completions", json=COMPLETION | {"prompt": "break the tokenizer"})
        httpx.get(f"{server.url}/health", timeout=30)
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda: "was killed by SIGKILL" in server.errors)
        server.stop()
        entries = [json.loads(line) for line in server.errors.splitlines()]
    for entry in entries:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
        assert {"level", "process", "pid", "logger", "message"} <= entry.keys()
    answered, broken, health = (entry for entry in entries if entry["logger"] == "engine.server.access")
    assert (answered["message"], answered["status"]) == ('"POST /v1/completions" 200', 200)
    assert (answered["request_id"], answered["trace_id"], answered["process"]) == ("mine", trace, "front end")
    assert (health["target"], health["trace_id"]) == ("/health", None)
    (error,) = (entry for entry in entries if "exception" in entry)
    assert error["request_id"] == broken["request_id"] == failed.headers["x-request-id"]
    assert error["exception"].endswith("RuntimeError: the tokenizer broke")
    (down,) = (entry for entry in entries if entry["process"] == "supervisor" and entry["level"] == "error")
    assert "was killed by SIGKILL" in down["message"]
