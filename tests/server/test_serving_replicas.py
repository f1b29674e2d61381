"""Several replicas behind the same front ends, with fake engines and with the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest

Serve = Callable[..., AbstractContextManager[Any]]
ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def by_replica(server: Any, name: str, get: Callable[..., httpx.Response] = httpx.get) -> list[float]:
    """The values of a metric for the replicas."""
    metrics = server.metrics(get)
    return [metrics[f'engine_{name}{{replica="{replica}"}}'] for replica in range(2)]


def complete_many(
    server: Any, count: int, during: Callable[[list[float]], None], each: int = 1, **body: Any
) -> list[httpx.Response]:
    """Send `count` concurrent completions of `each` engine requests.

    during: called when all of them are running, with their number on each replica.
    """

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=COMPLETION | body)) for _ in range(count)]

            def wait_until_running() -> None:
                running: list[float] = []

                def all_run() -> bool:
                    running[:] = by_replica(server, "num_requests_running")
                    return sum(running) >= count * each

                server.until(all_run)
                during(running)

            await asyncio.to_thread(wait_until_running)
            return await asyncio.gather(*tasks)

    return asyncio.run(all_of_them())


def test_load_spreads_over_replicas_from_all_front_ends(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(replicas=2, api_workers=2, options=gate.options) as server:
        spread: list[float] = []

        def during(running: list[float]) -> None:
            spread.extend(running)
            gate.open()

        answers = complete_many(server, 8, during)
        assert sum(spread) == 8
        assert min(spread) >= 3  # two front ends may choose at the same moment
        assert [answer.status_code for answer in answers] == [200] * 8
        server.until(lambda: sum(by_replica(server, "num_requests_running")) == 0)
        assert server.metrics()['engine_requests_finished_total{finish_reason="length"}'] == 8
        assert server.stop() == 0
        assert server.errors == ""


def test_choices_of_a_prompt_and_requests_of_a_key_stay_together_and_prompts_spread(
    serve_fake: Serve, gate: Any
) -> None:
    with serve_fake(replicas=2, options=gate.options) as server:
        spread: list[float] = []

        def during(running: list[float]) -> None:
            spread.extend(running)
            gate.open()

        (answer,) = complete_many(server, 1, during, each=4, n=4, max_tokens=50)
        assert sorted(spread) == [0, 4]
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
        body = COMPLETION | {"prompt": [f"prompt {index}" for index in range(6)], "max_tokens": 3, "seed": 0}
        texts = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"]
        assert [choice["text"] for choice in texts] == ["abc"] * 6
        server.until(lambda: sum(by_replica(server, "generation_tokens_total")) == 4 * 50 + 6 * 3)
        before = by_replica(server, "generation_tokens_total")
        assert sorted(before) == [3 * 3, 4 * 50 + 3 * 3]
        for number in range(6):  # whose prompts go to both replicas without a key
            asked = {"model": "tiny", "max_tokens": 3, "prompt_cache_key": "session"}
            chat = asked | {"messages": [{"role": "user", "content": f"turn {number} of a chat"}]}
            httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=30).raise_for_status()
            completion = asked | {"prompt": f"{number} is how this prompt begins"}
            httpx.post(f"{server.url}/v1/completions", json=completion, timeout=30).raise_for_status()
        server.until(lambda: sum(by_replica(server, "generation_tokens_total")) == sum(before) + 12 * 3)
        after = by_replica(server, "generation_tokens_total")
        assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 12 * 3]


def test_requests_fail_only_on_killed_replicas(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(replicas=2, api_workers=2, replica_restarts=0, options=gate.options) as server:
        first, second = server.engine_pids()

        def kill(_: list[float]) -> None:
            os.kill(second, signal.SIGKILL)
            with server.client_per_front_end() as clients:
                for client in clients:
                    server.until(lambda client=client: by_replica(server, "up", get=client.get) == [1, 0])
            gate.open()

        answers = complete_many(server, 8, kill)
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}
        assert 3 <= statuses.count(503) <= 5
        (message,) = {answer.json()["error"]["message"] for answer in answers if answer.status_code == 503}
        assert "replica 1 of the engine failed: its process was killed by SIGKILL" in message
        assert "try again" in message
        answers = [httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        health = httpx.get(f"{server.url}/health", params={"deep": 1}, timeout=30)
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert [each["status"] for each in health.json()["replicas"]] == ["ok", "failed"]
        os.kill(server.front_end_pids()[0], signal.SIGKILL)  # its successor must learn of the dead replica too
        server.until(lambda: len(server.front_end_pids()) == 2)
        with server.client_per_front_end() as clients:
            for client in clients:
                server.until(lambda client=client: client.get("/health").json()["status"] == "degraded")
                assert client.post("/v1/completions", json=COMPLETION).status_code == 200
            os.kill(first, signal.SIGKILL)
            for client in clients:
                server.until(lambda client=client: client.get("/health").status_code == 503)
                body = client.get("/health").json()
                assert (body["level"], [each["status"] for each in body["replicas"]]) == ("process", ["failed"] * 2)
                refused = client.post("/v1/completions", json=COMPLETION)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
                assert "restart the server" in refused.json()["error"]["message"]
        assert server.stop() == 1


def test_a_killed_replica_ends_the_whole_request_with_several_prompts(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(replicas=2, options=gate.options) as server:

        def kill(running: list[float]) -> None:
            assert running == [3, 3]
            os.kill(server.engine_pids()[0], signal.SIGKILL)

        prompts = [f"prompt {index}" for index in range(6)]
        (answer,) = complete_many(server, 1, kill, each=6, prompt=prompts, max_tokens=200)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        server.until(lambda: by_replica(server, "num_requests_running") == [0, 0])
        metrics = server.metrics()
        assert metrics['engine_requests_finished_total{finish_reason="error"}'] == 6
        assert by_replica(server, "generation_tokens_total")[1] == 3  # and no more: the others are aborted


def test_a_stuck_replica_gets_no_new_requests(serve_fake: Serve) -> None:
    with serve_fake(replicas=2, health_timeout=3.0) as server:
        stopped = server.engine_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).json()["status"] == "degraded")
        for index in range(8):  # some of these would be routed to the stuck replica
            body = COMPLETION | {"prompt": f"{index} is the beginning of the first block"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
        os.kill(stopped, signal.SIGCONT)
        server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).json()["status"] == "ok")
        assert server.stop() == 0


def test_the_server_exits_when_a_replica_cannot_start(serve_fake: Serve) -> None:
    with serve_fake(replicas=2, options={"start_error": "no room"}) as server:
        assert server.process.wait(30) == 1
        assert "error: replica " in server.errors
        assert "no room" in server.errors
        assert server.leftovers() == []


@pytest.fixture(scope="module")
def serve_tiny(tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., Any]) -> Callable[..., Any]:
    """Starts `engine serve` on a tiny checkpoint with these flags."""
    from engine.testing.checkpoints import make_checkpoint

    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tokenizer=True)
    flags = ["--port", "0", "--kv-memory", "8MiB", "--max-len", "256", "--dtype", "float32", "--device", "cpu"]

    def serve(*more: str) -> Any:
        command = [*ENGINE, "serve", "--model", str(checkpoint), *flags, *more]
        return start_server(command, tmp_path_factory.mktemp("serve"))

    return serve


@pytest.fixture
def client() -> Iterator[Callable[[Any], openai.OpenAI]]:
    """Connects the openai client to a server."""
    made: list[openai.OpenAI] = []

    def connect(server: Any) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.mark.e2e
def test_two_real_replicas_share_requests_and_one_is_restarted(
    serve_tiny: Callable[..., Any], client: Callable[[Any], openai.OpenAI], alive: Callable[[int], bool]
) -> None:
    server = serve_tiny("--replicas", "2", "--api-workers", "1")
    assert server.url, server.errors
    assert "on 2 replicas" in server.output
    openai_client = client(server)
    prompts = [
        f"{index} of the prompts that begin in different ways, and are long enough to fill blocks" for index in range(6)
    ]
    texts: list[str] = []
    cached: list[int] = []
    for prompt in prompts * 2:
        made = openai_client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        texts.append(made.choices[0].text)
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        cached.append(made.usage.prompt_tokens_details.cached_tokens or 0)
    assert texts[:6] == texts[6:]
    assert all(count >= 16 for count in cached[6:])  # equal prompts were routed to the replica with their blocks
    server.until(lambda: min(by_replica(server, "prompt_tokens_total")) > 0)

    children, (survivor, victim) = server.children(), server.engine_pids()
    asked: Any = {"model": "tiny", "max_tokens": 240, "n": 8, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [openai_client.completions.create(prompt=prompt, **asked) for prompt in ("one", "two")]
    for stream in streams:
        next(iter(stream))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    ends = [final_error(stream) for stream in streams]
    assert time.monotonic() - killed < 20
    assert sorted(end == "" for end in ends) == [False, True]
    assert "replica 1 of the engine failed" in max(ends)
    health = httpx.get(f"{server.url}/health", timeout=30).json()
    assert [(each["replica"], each["status"] == "ok") for each in health["replicas"]] == [(0, True), (1, False)]
    for prompt in prompts:
        openai_client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    assert alive(survivor)
    server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).json()["status"] == "ok", 60)
    assert by_replica(server, "restarts_total") == [0, 1]
    streams = [openai_client.completions.create(prompt=each, **asked | {"max_tokens": 9}) for each in ("one", "two")]
    assert [final_error(stream) for stream in streams] == ["", ""]
    server.until(lambda: min(by_replica(server, "generation_tokens_total")) > 0)  # the restarted replica gets its share
    for prompt, text in zip(prompts, texts, strict=False):
        made = openai_client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        assert made.choices[0].text == text
    children |= server.children()
    assert server.stop() == 0
    assert not any(map(alive, children))
    assert server.leftovers() == []


def final_error(stream: Any) -> str:
    """Read a stream to its end; the error that ended it, or an empty string."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return str(error)
    return ""


@pytest.mark.e2e
def test_more_replicas_than_gpus_are_refused(serve_tiny: Callable[..., Any]) -> None:
    server = serve_tiny("--replicas", "200", "--device", "cuda")
    assert server.process.returncode == 2
    assert "200 replicas need 200 GPUs from cuda:0 on" in server.errors
    assert "Traceback" not in server.errors
