"""Restarts of dead replicas, as clients, /health and /metrics see them, with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.config.tree import EngineConfig
from engine.core.errors import EngineError
from engine.server.supervisor.engines import Engines
from engine.server.supervisor.restart_policy import MAX_DELAY, STABLE_UPTIME, RestartPolicy

Serve = Callable[..., AbstractContextManager[Any]]
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def health(server: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/health", timeout=30)
    return answer.status_code, answer.json()


def replica_health(server: Any, replica: int) -> dict[str, Any]:
    """The entry of a replica in /health."""
    found: dict[str, Any] = health(server)[1]["replicas"][replica]
    return found


def statuses(server: Any) -> list[str]:
    return [each["status"] for each in health(server)[1]["replicas"]]


def all_healthy(server: Any) -> bool:
    return health(server) == (200, {"status": "ok", "replicas": [{"replica": n, "status": "ok"} for n in range(2)]})


def by_replica(server: Any, name: str) -> list[float]:
    """The values of a metric for the two replicas."""
    metrics = server.metrics()
    return [metrics[f'engine_{name}{{replica="{replica}"}}'] for replica in range(2)]


def complete(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=COMPLETION | body, timeout=30)


@contextlib.contextmanager
def two_replicas(serve_fake: Serve, **settings: Any) -> Iterator[Any]:
    """A server with two replicas that are restarted after 50 ms."""
    with serve_fake(**({"replicas": 2, "replica_restart_pause": 0.05} | settings)) as server:
        yield server


def test_a_replica_killed_twice_is_restarted_twice(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    options = {"delay": 0.01, "at_start": str(at_start), "helper": True}
    with two_replicas(serve_fake, options=options) as server:
        first, second = server.engine_pids()
        assert by_replica(server, "restarts_total") == [0, 0]
        for attempt in (1, 2):
            at_start.write_text("wait")
            victim = server.engine_pids()[-1]
            os.kill(victim, signal.SIGKILL)
            server.until(lambda: statuses(server) == ["ok", "starting"])
            assert health(server)[0] == 200
            assert health(server)[1]["status"] == "degraded"
            state = replica_health(server, 1)
            assert state["reason"] == "its process was killed by SIGKILL (out of memory?)"
            assert state["restart"] == f"try {attempt} of 5"
            assert by_replica(server, "up") == [1, 0]
            assert helpers(server, victim) == []  # before the next one starts
            assert complete(server).status_code == 200
            if attempt == 1:  # a front end started now must receive the state too
                (front,) = server.front_end_pids()
                os.kill(front, signal.SIGKILL)
                server.until(lambda front=front: server.front_end_pids() not in ([], [front]))
            assert statuses(server) == ["ok", "starting"]
            at_start.unlink()
            server.until(lambda: all_healthy(server))
            assert server.engine_pids()[0] == first
            assert server.engine_pids()[1] not in (second, victim)
        assert replica_health(server, 1) == {"replica": 1, "status": "ok"}
        assert by_replica(server, "restarts_total") == [0, 2]
        assert by_replica(server, "up") == [1, 1]
        answer = complete(server, prompt=[f"prompt {index}" for index in range(6)], max_tokens=30, seed=0)
        assert answer.status_code == 200
        server.until(
            lambda: by_replica(server, "generation_tokens_total")[1] == 3 * 30
        )  # the restarted replica gets its share
        sockets = [path.name for path in server.leftovers()[0].glob("engine-*")]
        assert sorted(sockets) == ["engine-0.0", "engine-1.2"]
        assert "replica 1 of the engine accepts requests again" in server.errors
        assert server.stop() == 0  # all replicas are up


def helpers(server: Any, group: int) -> list[int]:
    """Process IDs in the process group of a dead engine process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found.append(int(directory.name))
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stopped_engine_process_is_restarted(serve_fake: Serve, replicas: int) -> None:
    with serve_fake(replicas=replicas, engine_timeout=2.0, replica_restart_pause=0.05) as server:
        stopped, *others = server.engine_pids()
        os.kill(stopped, signal.SIGSTOP)
        server.until(lambda: len(server.engine_pids()) == replicas and stopped not in server.engine_pids(), 20)
        server.until(lambda: health(server)[1]["status"] == "ok", 20)
        assert set(others) < set(server.engine_pids())
        assert complete(server).status_code == 200
        assert (
            "its loop was stuck for 2 s (server.engine_timeout), so its process was killed; restart: " in server.errors
        )
        assert server.stop() == 0


def test_an_idle_engine_process_is_not_restarted(serve_fake: Serve) -> None:
    with serve_fake(engine_timeout=2.0) as server:
        pids = server.engine_pids()
        everyone = [server.process.pid, *server.children()]
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everyone:
                os.kill(pid, signal_number)
            time.sleep(3)
        assert server.engine_pids() == pids
        assert server.errors == ""


def test_a_replica_is_given_up_after_its_last_try(serve_fake: Serve) -> None:
    with two_replicas(serve_fake, replica_restarts=1) as server:
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: by_replica(server, "restarts_total") == [0, 1])
        server.until(lambda: all_healthy(server))
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: "given up" in replica_health(server, 1).get("restart", ""))
        assert replica_health(server, 1)["status"] == "failed"
        assert replica_health(server, 1)["restart"] == "none, given up after try 1 of 1 (server.replica_restarts)"
        assert by_replica(server, "restarts_total") == [0, 1]
        assert complete(server).status_code == 200
        assert len(server.engine_pids()) == 1
        assert server.stop() == 1


def test_a_replica_killed_while_starting_is_restarted(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two_replicas(serve_fake, options={"at_start": str(at_start)}) as server:
        at_start.write_text("wait")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: replica_health(server, 1).get("restart") == "try 1 of 5")
        since = replica_health(server, 1)["since"]
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: replica_health(server, 1).get("restart") == "try 2 of 5")
        assert (
            replica_health(server, 1)["reason"] == "its process was killed by SIGKILL (out of memory?) while it started"
        )
        assert replica_health(server, 1)["since"] == since  # the replica accepted no requests meanwhile
        at_start.unlink()
        server.until(lambda: all_healthy(server))
        assert by_replica(server, "restarts_total") == [0, 2]


def test_a_replica_that_refuses_its_settings_is_not_restarted(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two_replicas(serve_fake, options={"at_start": str(at_start)}) as server:
        at_start.write_text("refuse")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: replica_health(server, 1).get("restart") == "none, it would fail again")
        assert replica_health(server, 1)["reason"] == "the setting is wrong by now"
        assert by_replica(server, "restarts_total") == [0, 1]
        assert complete(server).status_code == 200
        assert server.stop() == 1


def test_all_replicas_are_restarted_when_all_are_killed(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two_replicas(serve_fake, options={"at_start": str(at_start)}) as server:
        at_start.write_text("wait")
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        server.until(lambda: statuses(server) == ["starting", "starting"])
        status, body = health(server)
        assert (status, body["status"], body["level"]) == (503, "starting", "process")
        os.kill(server.front_end_pids()[0], signal.SIGKILL)

        def refused() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return complete(server).status_code == 503
            return False

        server.until(refused)  # by a front end that has never seen the replicas up
        error = complete(server).json()["error"]
        assert error["code"] == "engine_failed"
        assert "it is being restarted, so try again later" in error["message"]
        at_start.unlink()
        server.until(lambda: all_healthy(server))
        assert complete(server).json()["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0


@pytest.mark.parametrize("pause", [0.05, 30.0])
def test_shutdown_does_not_wait_for_a_restart(
    serve_fake: Serve, tmp_path: Path, pause: float, alive: Callable[[int], bool]
) -> None:
    at_start = tmp_path / "at_start"
    with two_replicas(serve_fake, options={"at_start": str(at_start)}, replica_restart_pause=pause) as server:
        at_start.write_text("wait")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: statuses(server) == ["ok", "starting" if pause < 1 else "failed"])
        children = server.children()
        server.process.terminate()
        assert server.process.wait(20) == 1
        assert not any(map(alive, children))
        assert server.leftovers() == []
        assert "did not stop" not in server.errors  # logged for a process that exceeds its time


@pytest.mark.parametrize("fault", ["killed", "a failed step"])
def test_a_single_replica_is_restarted(serve_fake: Serve, tmp_path: Path, fault: str) -> None:
    at_start = tmp_path / "at_start"
    options: dict[str, Any] = {"at_start": str(at_start)} | ({} if fault == "killed" else {"raise_after": 6})
    with serve_fake(replica_restart_pause=0.05, options=options) as server:
        assert complete(server).status_code == 200
        at_start.write_text("wait")
        if fault == "killed":
            os.kill(server.engine_pid(), signal.SIGKILL)
        else:
            assert "the fake step failed" in complete(server).json()["error"]["message"]
        server.until(lambda: health(server)[1].get("status") == "starting")
        status, state = health(server)
        assert (status, state["level"], state["restart"]) == (503, "process", "try 1 of 5")
        assert ("SIGKILL" if fault == "killed" else "the fake step failed") in state["reason"]
        assert "it is being restarted, so try again later" in complete(server).json()["error"]["message"]
        at_start.unlink()
        server.until(lambda: health(server) == (200, {"status": "ok"}))
        assert complete(server).status_code == 200
        assert server.stop() == 0


def test_a_single_replica_is_not_restarted_without_tries(serve_fake: Serve) -> None:
    with serve_fake(replica_restarts=0) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda: health(server)[0] == 503)
        assert "restart" not in health(server)[1]
        assert "restart the server" in complete(server).json()["error"]["message"]
        assert server.engine_pids() == []
        assert server.stop() == 1


def test_start_fails_when_the_process_cannot_be_started(
    fake_config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    async def start() -> None:
        await Engines([fake_config()], str(tmp_path), ["/nonexistent"]).start(lambda _: None)

    with pytest.raises(EngineError, match=r"its process could not be started: .*nonexistent"):
        asyncio.run(start())


def test_delays_double_and_a_stable_uptime_restores_all_tries() -> None:
    restarts = RestartPolicy(3, 2.0)
    assert [restarts.next_delay(0.0) for _ in range(5)] == [2.0, 4.0, 8.0, None, None]
    assert [restarts.next_delay(STABLE_UPTIME), restarts.next_delay(STABLE_UPTIME - 1)] == [2.0, 4.0]
    many = RestartPolicy(9, 1.0)
    assert [many.next_delay(0.0) for _ in range(9)][-1] == MAX_DELAY
    assert RestartPolicy(0, 1.0).next_delay(STABLE_UPTIME) is None
