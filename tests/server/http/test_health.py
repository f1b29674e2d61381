"""The three levels of /health, with a fake engine: the process, its loop, a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import httpx

Serve = Callable[..., AbstractContextManager[Any]]
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 3}


def health(server: Any, **query: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/health", params=query, timeout=30)
    return answer.status_code, answer.json()


def assert_failed(server: Any, level: str, reason: str, **query: Any) -> None:
    status, body = health(server, **query)
    assert (status, body["status"], body["level"]) == (503, "failed", level)
    assert reason in body["reason"]
    ago = (datetime.now(UTC) - datetime.fromisoformat(body["since"])).total_seconds()
    assert 0 < ago < 120


def test_a_deep_check_computes_a_step_that_counts_as_no_request(serve_fake: Serve) -> None:
    with serve_fake(api_workers=2) as server:
        before = server.metrics()
        for _ in range(3):
            status, body = health(server, deep=1)
            assert (status, body["status"]) == (200, "ok")
            assert 0 < body["step_seconds"] < 60
        with server.client_per_front_end() as clients:
            for client in clients:
                server.until(lambda client=client: server.metrics(client.get)["engine_steps_total"] == 3)
        after = server.metrics()
        for name in before:
            if ("finished" in name or "count" in name) and "_gc_" not in name:  # garbage may be collected meanwhile
                assert after[name] == before[name], name
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30).json()["choices"][0]["text"] == "abc"
        assert health(server) == (200, {"status": "ok"})


def test_a_deep_check_accepts_a_step_of_users_requests(server: Any, gate: Any) -> None:
    server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)
    before = server.metrics()["engine_generation_tokens_total"]
    body = BODY | {"prompt": gate.prompt, "max_tokens": 60, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert health(server, deep=1)[0] == 200
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 1)
        gate.open()
        for _ in lines:
            pass
    server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)
    assert server.metrics()["engine_generation_tokens_total"] == before + 60


def test_an_idle_engine_computes_a_step_periodically_and_health_fails_while_its_loop_is_stuck(
    serve_fake: Serve,
) -> None:
    with serve_fake(health_interval=0.1, health_timeout=3.0) as server:
        server.until(lambda: server.metrics()["engine_steps_total"] >= 2)
        assert health(server)[0] == 200
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.until(lambda: health(server)[0] == 503)
        assert_failed(server, "loop", "the engine's loop has been stuck for")
        assert httpx.get(f"{server.url}/v1/models", timeout=30).status_code == 200
        os.kill(engine, signal.SIGCONT)
        server.until(lambda: health(server)[0] == 200)


def test_health_fails_while_a_worker_loop_is_stuck(serve_fake: Serve) -> None:
    with serve_fake(options={"silent_rank": 3}, health_timeout=3.0) as server:
        server.until(lambda: health(server)[0] == 503)
        assert_failed(server, "loop", "the loop of rank 3 has been stuck for")


def test_health_fails_when_no_step_completes(serve_fake: Serve) -> None:
    with serve_fake(options={"stuck": True}, health_timeout=3.0) as server:
        assert health(server) == (200, {"status": "ok"})
        start_time = time.monotonic()
        assert_failed(server, "step", "no step has completed for", deep=1)
        assert time.monotonic() - start_time > 2.9
        assert_failed(server, "step", "no step has completed for")  # without another request for a step


def test_health_fails_when_the_engine_process_is_killed(serve_fake: Serve) -> None:
    with serve_fake(replica_restarts=0) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda: health(server)[0] == 503)
        assert_failed(server, "process", "SIGKILL")
        assert_failed(server, "process", "SIGKILL", deep=1)


def test_deep_must_be_0_or_1(server: Any) -> None:
    assert health(server, deep=0) == (200, {"status": "ok"})
    assert httpx.get(f"{server.url}/health", params={"deep": "perhaps"}, timeout=30).status_code == 400
