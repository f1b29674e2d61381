"""Several front ends of one server, with a fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx

from engine.core.config.server import ServerConfig
from engine.server.supervisor.main import num_front_ends

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
NOTICE = 10.0
"""Seconds in which clients learn of a dead process: 2 by the documentation, and more where the machine is busy."""
FINISHED = 'engine_requests_finished_total{finish_reason="%s"}'


def streams(server: Any, count: int, during: Callable[[], None] = lambda: None, **body: Any) -> list[str]:
    """Run `count` concurrent streams; the text of each, or the name of its error. during: called once all run."""

    async def one(client: httpx.AsyncClient, started: asyncio.Semaphore) -> str:
        text = ""
        try:
            asked = COMPLETION | {"stream": True} | body
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                async for line in response.aiter_lines():
                    if not text:
                        started.release()
                    text += line
        except httpx.HTTPError as error:
            return type(error).__name__
        return text

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        started = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            tasks = [asyncio.create_task(one(client, started)) for _ in range(count)]
            for _ in range(count):
                await started.acquire()
            await asyncio.to_thread(during)
            return await asyncio.gather(*tasks)

    return asyncio.run(all_of_them())


def test_connections_spread_evenly_and_metrics_add_up(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(api_workers=2, options=gate.options) as server:
        spread: list[int] = []

        def during() -> None:
            spread.extend(server.connections().values())
            server.until(lambda: server.metrics()["engine_num_requests_running"] == 64)
            gate.open()

        texts = streams(server, 64, during, max_tokens=6)
        assert spread == [32, 32]
        assert all(text.endswith("data: [DONE]") for text in texts)
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)
        server.until(lambda: sum(server.connections().values()) == 0)
        with server.client_per_front_end() as clients:
            assert list(server.connections().values()) == [1, 1]
            seen: list[dict[str, float]] = []

            def are_equal() -> bool:
                """Soon: each front end hears from the engine separately, and may collect garbage in between."""
                seen[:] = [server.metrics(client.get) for client in clients]
                first, second = (
                    {name: value for name, value in each.items() if not name.startswith("process_")} for each in seen
                )
                return first == second

            server.until(are_equal)
        metrics, other = seen
        of_processes = [name for name in metrics if name.startswith("process_")]
        assert {name.partition("{")[0] for name in of_processes} >= {"process_cpu_seconds_total", "process_open_fds"}
        assert all(f'process_threads{{process="front_end",number="{row}"}}' in of_processes for row in range(2))
        assert all(name in other for name in of_processes)
        assert metrics[FINISHED % "length"] == 64
        assert metrics["engine_time_to_first_token_seconds_count"] == 64
        assert metrics["engine_generation_tokens_total"] == 64 * 6
        assert (
            httpx.get(f"{server.url}/v1/models", timeout=30).json()
            == httpx.get(f"{server.url}/v1/models", timeout=30).json()
        )
        assert server.stop() == 0
        assert server.errors == ""


def test_a_killed_front_end_is_replaced(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(api_workers=2) as server:
        streams(server, 8)
        before = server.metrics()
        pids = server.front_end_pids()
        server.until(lambda: sum(server.connections().values()) == 0)

        def during() -> None:
            server.until(lambda: server.metrics()["engine_num_requests_running"] == 16)
            os.kill(pids[0], signal.SIGKILL)
            server.until(
                lambda: server.metrics()["engine_num_requests_running"] == 8
            )  # those of the killed one were aborted
            gate.open()

        texts = streams(server, 16, during, prompt=gate.prompt)
        assert sum(text.endswith("data: [DONE]") for text in texts) == 8
        assert sum(text in {"RemoteProtocolError", "ReadError"} for text in texts) == 8
        server.until(lambda: len(server.front_end_pids()) == 2)
        assert pids[0] not in server.front_end_pids()
        assert pids[1] in server.front_end_pids()

        def counts_go_on() -> bool:  # soon: a front end that has just started waits for the engine's
            after = server.metrics()
            return all(after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count")))

        server.until(counts_go_on)
        after = server.metrics()
        assert after[FINISHED % "abort"] == before[FINISHED % "abort"] + 8
        assert after[FINISHED % "length"] == before[FINISHED % "length"] + 8

        def both_work() -> bool:
            held: list[int] = []
            streams(server, 2, lambda: held.extend(server.connections().values()))
            return held == [1, 1]

        server.until(both_work)
        assert "was killed by SIGKILL" in server.errors
        assert server.stop() == 0


def test_all_front_ends_learn_of_a_killed_engine_process(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(api_workers=2, replica_restarts=0) as server:
        killed: list[float] = []

        def during() -> None:
            os.kill(server.engine_pid(), signal.SIGKILL)
            killed.append(time.monotonic())

        texts = streams(server, 8, during, prompt=gate.prompt)
        assert time.monotonic() - killed[0] < NOTICE
        assert all('"code":"engine_failed"' in text.rpartition("data: ")[2] for text in texts)
        with server.client_per_front_end() as clients:
            for client in clients:
                assert client.get("/health").status_code == 503
                assert server.metrics(client.get)["engine_up"] == 0
                assert client.post("/v1/completions", json=COMPLETION).status_code == 503
        assert server.stop() == 1


def test_sigterm_drains_all_front_ends(serve_fake: Serve, gate: Any, alive: Callable[[int], bool]) -> None:
    with serve_fake(api_workers=2) as server:
        children = server.children()

        def during() -> None:
            server.process.terminate()
            with server.client_per_front_end() as clients:
                for client in clients:
                    server.until(lambda client=client: client.get("/health").status_code == 503)
                    refused = client.post("/v1/completions", json=COMPLETION)
                    assert refused.json()["error"]["code"] == "shutting_down"
            gate.open()

        texts = streams(server, 8, during, prompt=gate.prompt)
        assert all(text.endswith("data: [DONE]") for text in texts)
        assert server.process.wait(30) == 0
        assert not any(map(alive, children))


def test_front_ends_ignore_sigint_and_sigterm(server: Any) -> None:
    (pid,) = server.front_end_pids()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30).status_code == 200
    assert server.front_end_pids() == [pid]


def test_num_front_ends_is_the_setting_or_1_to_4() -> None:
    assert num_front_ends(ServerConfig(api_workers=3)) == 3
    assert 1 <= num_front_ends(ServerConfig()) <= 4
