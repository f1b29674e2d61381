"""Dead replicas are started anew: what clients, /health and /metrics see of it, with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.config.tree import EngineConfig
from engine.core.errors import EngineError
from engine.server.supervisor.engines import Engines
from engine.server.supervisor.restarts import LONGEST_PAUSE, STEADY, Restarts

Serve = Callable[..., AbstractContextManager[Any]]
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def health(server: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/health")
    return answer.status_code, answer.json()


def one(server: Any, replica: int) -> dict[str, Any]:
    """What /health says of a replica."""
    found: dict[str, Any] = health(server)[1]["replicas"][replica]
    return found


def statuses(server: Any) -> list[str]:
    return [each["status"] for each in health(server)[1]["replicas"]]


def is_well(server: Any) -> bool:
    return health(server) == (200, {"status": "ok", "replicas": [{"replica": n, "status": "ok"} for n in range(2)]})


def by_replica(server: Any, name: str) -> list[float]:
    """A metric of each of two replicas."""
    metrics = server.metrics()
    return [metrics[f'engine_{name}{{replica="{replica}"}}'] for replica in range(2)]


def complete(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=COMPLETION | body, timeout=30)


@contextlib.contextmanager
def two(serve_fake: Serve, **settings: Any) -> Iterator[Any]:
    """A server with two replicas that are started anew at once."""
    with serve_fake(**({"replicas": 2, "replica_restart_pause": 0.05} | settings)) as server:
        yield server


def test_one_of_two_is_killed_twice_and_comes_back(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    options = {"delay": 0.01, "at_start": str(at_start), "helper": True}
    with two(serve_fake, options=options) as server:
        first, second = server.engine_pids()
        assert by_replica(server, "restarts_total") == [0, 0]
        for time in (1, 2):
            at_start.write_text("wait")
            victim = server.engine_pids()[-1]
            os.kill(victim, signal.SIGKILL)
            server.until(lambda: statuses(server) == ["ok", "starting"])
            assert health(server)[0] == 200
            assert health(server)[1]["status"] == "degraded"
            told = one(server, 1)
            assert told["reason"] == "its process was killed by SIGKILL (out of memory?)"
            assert told["restart"] == f"try {time} of 5"
            assert by_replica(server, "up") == [1, 0]
            assert helpers(server, victim) == []  # before the next one starts
            assert complete(server).status_code == 200
            if time == 1:  # another front end hears of all this later
                (front,) = server.front_end_pids()
                os.kill(front, signal.SIGKILL)
                server.until(lambda front=front: server.front_end_pids() not in ([], [front]))
            assert statuses(server) == ["ok", "starting"]
            at_start.unlink()
            server.until(lambda: is_well(server))
            assert server.engine_pids()[0] == first
            assert server.engine_pids()[1] not in (second, victim)
        assert one(server, 1) == {"replica": 1, "status": "ok"}
        assert by_replica(server, "restarts_total") == [0, 2]
        assert by_replica(server, "up") == [1, 1]
        answer = complete(server, prompt=[f"prompt {index}" for index in range(6)], max_tokens=30, seed=0)
        assert answer.status_code == 200
        server.until(lambda: by_replica(server, "generation_tokens_total")[1] == 3 * 30)  # it has its share again
        sockets = [path.name for path in server.leftovers()[0].glob("engine-*")]
        assert sorted(sockets) == ["engine-0.0", "engine-1.2"]
        assert "replica 1 of the engine takes requests again" in server.errors
        assert server.stop() == 0  # all are well


def helpers(server: Any, group: int) -> list[int]:
    """Processes of a dead engine process's group."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found.append(int(directory.name))
    return found


def test_beyond_the_limit_it_is_given_up(serve_fake: Serve) -> None:
    with two(serve_fake, replica_restarts=1) as server:
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: by_replica(server, "restarts_total") == [0, 1])
        server.until(lambda: is_well(server))
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: "given up" in one(server, 1).get("restart", ""))
        assert one(server, 1)["status"] == "failed"
        assert one(server, 1)["restart"] == "none, given up after try 1 of 1 (server.replica_restarts)"
        assert by_replica(server, "restarts_total") == [0, 1]
        assert complete(server).status_code == 200
        assert len(server.engine_pids()) == 1
        assert server.stop() == 1


def test_one_that_is_killed_while_it_starts_is_tried_again(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two(serve_fake, options={"at_start": str(at_start)}) as server:
        at_start.write_text("wait")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: one(server, 1).get("restart") == "try 1 of 5")
        since = one(server, 1)["since"]
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: one(server, 1).get("restart") == "try 2 of 5")
        assert one(server, 1)["reason"] == "its process was killed by SIGKILL (out of memory?) while it started"
        assert one(server, 1)["since"] == since  # it took no requests meanwhile
        at_start.unlink()
        server.until(lambda: is_well(server))
        assert by_replica(server, "restarts_total") == [0, 2]


def test_a_wrong_setting_is_not_tried_again(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two(serve_fake, options={"at_start": str(at_start)}) as server:
        at_start.write_text("refuse")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: one(server, 1).get("restart") == "none, it would fail again")
        assert one(server, 1)["reason"] == "the setting is wrong by now"
        assert by_replica(server, "restarts_total") == [0, 1]
        assert complete(server).status_code == 200
        assert server.stop() == 1


def test_all_are_killed_at_once_and_come_back(serve_fake: Serve, tmp_path: Path) -> None:
    at_start = tmp_path / "at_start"
    with two(serve_fake, options={"at_start": str(at_start)}) as server:
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

        server.until(refused)  # by a front end that has never seen one at work
        error = complete(server).json()["error"]
        assert error["code"] == "engine_failed"
        assert "it is started anew, so try again later" in error["message"]
        at_start.unlink()
        server.until(lambda: is_well(server))
        assert complete(server).json()["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0


@pytest.mark.parametrize("pause", [0.05, 30.0])
def test_the_server_does_not_wait_for_one_that_is_coming(
    serve_fake: Serve, tmp_path: Path, pause: float, alive: Callable[[int], bool]
) -> None:
    at_start = tmp_path / "at_start"
    with two(serve_fake, options={"at_start": str(at_start)}, replica_restart_pause=pause) as server:
        at_start.write_text("wait")
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        server.until(lambda: statuses(server) == ["ok", "starting" if pause < 1 else "failed"])
        children = server.children()
        server.process.terminate()
        assert server.process.wait(20) == 1
        assert not any(map(alive, children))
        assert server.leftovers() == []
        assert "did not stop" not in server.errors  # as what is still there after its time


def test_the_only_replica_stays_dead(serve_fake: Serve) -> None:
    with serve_fake(replica_restart_pause=0.0) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda: health(server)[0] == 503)
        assert "restart" not in health(server)[1]
        assert "the server needs a restart" in complete(server).json()["error"]["message"]
        assert server.engine_pids() == []
        assert server.stop() == 1


def test_no_process_to_be_had(fake_config: Callable[..., EngineConfig], tmp_path: Path) -> None:
    async def start() -> None:
        await Engines([fake_config()], str(tmp_path), ["/nonexistent"]).start(lambda _: None)

    with pytest.raises(EngineError, match=r"its process could not be started: .*nonexistent"):
        asyncio.run(start())


def test_pauses_grow_and_a_steady_life_gives_all_tries_back() -> None:
    restarts = Restarts(3, 2.0)
    assert [restarts.next(0.0) for _ in range(5)] == [2.0, 4.0, 8.0, None, None]
    assert [restarts.next(STEADY), restarts.next(STEADY - 1)] == [2.0, 4.0]
    many = Restarts(9, 1.0)
    assert [many.next(0.0) for _ in range(9)][-1] == LONGEST_PAUSE
    assert Restarts(0, 1.0).next(STEADY) is None
