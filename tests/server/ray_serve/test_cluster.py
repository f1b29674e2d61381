"""The application on a local Ray cluster: faults, scaling, draining. `make ray-serve-test` runs these tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from engine.core.config.server import ServerConfig
from engine.core.config.tree import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from engine.core.executors import MessageDecoder
from engine.server.ray_serve.messages import ReplicaState
from engine.server.ray_serve.options import Options

pytestmark = [
    pytest.mark.skipif("RAY_SERVE_RESULTS" not in os.environ, reason="`make ray-serve-test` runs these tests"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

FAKE_ENGINE = Path(__file__).parent.parent / "fake_engine.py"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Cluster:
    """The application, from outside."""

    def __init__(self, url: str, until: Callable[..., float]) -> None:
        self.url = url
        self.until = until
        self._decoder: MessageDecoder[ReplicaState] = MessageDecoder(ReplicaState)

    def reports(self) -> list[ReplicaState]:
        """Of all replicas that answer."""
        from ray import serve

        answers = (
            serve.get_deployment_handle("engine", "default")
            .broadcast("report")
            .results(timeout_s=60, return_exceptions=True)
        )
        return [self._decoder.decode(answer) for answer in answers if isinstance(answer, bytes)]

    def running(self) -> Counter[str]:
        """Requests in the engine of each replica."""
        return Counter({report.replica: report.stats.running for report in self.reports()})

    def num_replicas(self) -> int:
        from ray import serve

        status = serve.status().applications["default"].deployments["engine"]
        return sum(status.replica_states.values())

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=self.body(**body), timeout=300)

    @staticmethod
    def body(**body: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": "hello", "max_tokens": 20, **body}


@attrs.define
class Answer:
    text: str = ""
    error: dict[str, Any] | None = None
    status: int = 0


@contextmanager
def streams(cluster: Cluster, count: int, **body: Any) -> Iterator[list[Answer]]:
    """Streams in progress; at the end of the block, their answers are whole."""
    answers = [Answer() for _ in range(count)]

    async def one(client: httpx.AsyncClient, answer: Answer) -> None:
        async with client.stream("POST", "/v1/completions", json=cluster.body(stream=True, **body)) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    answer.error = event.get("error", answer.error)
                    answer.text += "".join(choice["text"] for choice in event.get("choices", ()))

    async def everything() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(one(client, answer) for answer in answers))

    thread = threading.Thread(target=asyncio.run, args=(everything(),))
    thread.start()
    yield answers
    thread.join(600)
    assert not thread.is_alive(), "a request hangs"


@contextmanager
def steady_load(cluster: Cluster, clients: int = 2) -> Iterator[list[Answer]]:
    """Short requests, one after another per client, until the end of the block."""
    answers: list[Answer] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            response = cluster.complete(max_tokens=4)
            body = response.json()
            text = "" if "choices" not in body else body["choices"][0]["text"]
            answers.append(Answer(text, body.get("error"), response.status_code))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(300)


@pytest.fixture
def deploy(cluster: str, until: Callable[..., float]) -> Iterator[Callable[..., Cluster]]:
    """deploy(Options fields): the application with fake engines."""
    from fake_front_end import ByteTokenizer  # type: ignore[import-not-found]
    from ray import serve

    from engine.server.ray_serve.application import make_application

    def start(engine: dict[str, Any] | None = None, **options: Any) -> Cluster:
        config = EngineConfig(
            model=ModelConfig(path="/somewhere/tiny"),
            executor=ExecutorConfig(device="cpu", options={"delay": 0.002, **(engine or {})}),
            server=ServerConfig(log_level="info", admin_api_key=("admin",)),
        )
        application = make_application(
            config,
            Options(cpus=0.1, **options),
            engine_command=(sys.executable, "-P", str(FAKE_ENGINE)),
            open_tokenizer=ByteTokenizer.of_model,
        )
        serve.run(application)
        return Cluster(cluster, until)

    yield start
    serve.delete("default")


def test_requests_of_a_killed_replica_fail_and_all_others_complete(
    deploy: Callable[..., Cluster], gate: Any, record: Any
) -> None:
    import ray

    cluster = deploy(min_replicas=2, max_replicas=2)
    with streams(cluster, 16, prompt=gate.prompt) as held, steady_load(cluster) as steady:
        cluster.until(lambda: sum(cluster.running().values()) >= 16)
        on_each = cluster.running()
        victim, other = sorted(on_each, key=lambda name: on_each[name])
        killed = time.monotonic()
        ray.kill(ray.get_actor(f"SERVE_REPLICA::default#engine#{victim}", namespace="serve"))
        cluster.until(lambda: any(answer.error for answer in held))
        first_error = time.monotonic() - killed
        cluster.until(lambda: {report.replica for report in cluster.reports()} - {victim, other} != set())
        replaced = time.monotonic() - killed
        gate.open()
    failed = [answer for answer in held if answer.error is not None]
    complete = [answer for answer in held if answer.error is None]
    assert {answer.text for answer in complete} == {ALPHABET[:20]}
    assert failed
    assert complete
    for answer in failed:
        assert answer.error is not None
        assert answer.error["code"] == "engine_failed"
        assert "its process died" in answer.error["message"]
    lost = [answer for answer in steady if answer.status != 200]
    assert all(answer.error is not None and answer.error["code"] == "engine_failed" for answer in lost)
    # The steady clients have at most one request each in progress, so at most that many on the dead replica.
    assert len(lost) <= 2
    assert on_each[victim] - 2 <= len(failed) <= on_each[victim]
    record.add(
        "killed",
        replicas=2,
        requests=len(held) + len(steady),
        on_the_dead_replica=on_each[victim],
        failed=len(failed) + len(lost),
        seconds_to_the_error=round(first_error, 2),
        seconds_to_a_new_replica=round(replaced, 1),
    )


def test_a_replica_whose_engine_process_died_declines_requests_and_is_replaced(
    deploy: Callable[..., Cluster], gate: Any, record: Any
) -> None:
    cluster = deploy(min_replicas=2, max_replicas=2)
    before = {report.replica for report in cluster.reports()}
    with streams(cluster, 8, prompt=gate.prompt) as held, steady_load(cluster) as steady:
        cluster.until(lambda: sum(cluster.running().values()) >= 8)
        os.kill(engine_processes()[0], signal.SIGKILL)
        cluster.until(lambda: any(answer.error for answer in held))
        cluster.until(
            lambda: (
                len(names := {one.replica for one in cluster.reports() if one.fault is None}) == 2 and names != before
            )
        )
        gate.open()
    failed = [answer for answer in held if answer.error is not None]
    assert 0 < len(failed) < 8
    assert all("was killed by SIGKILL" in answer.error["message"] for answer in failed if answer.error)
    assert {answer.text for answer in held if answer.error is None} == {ALPHABET[:20]}
    lost = [answer for answer in steady if answer.status != 200]
    assert len(lost) <= 2  # those in progress
    record.add("engine process killed", requests=len(held) + len(steady), failed=len(failed) + len(lost))


def test_replicas_scale_from_one_to_three_and_back_without_a_lost_request(
    deploy: Callable[..., Cluster], gate: Any, record: Any
) -> None:
    cluster = deploy(
        min_replicas=1, max_replicas=3, target_requests=4, upscale_delay=1.0, downscale_delay=2.0, load_window=3.0
    )
    assert len(cluster.reports()) == 1
    with steady_load(cluster) as steady:
        with streams(cluster, 24, prompt=gate.prompt) as held:
            up = cluster.until(lambda: len(cluster.reports()) == 3)
            with streams(cluster, 6, prompt=gate.prompt) as later:  # these spread over the new replicas
                cluster.until(lambda: all(count > 0 for count in cluster.running().values()))
                spread = sorted(cluster.running().values())
                gate.open()
        down = cluster.until(lambda: cluster.num_replicas() == 1)
    for answer in (*held, *later):
        assert answer.error is None
        assert answer.text == ALPHABET[:20]
    assert {(answer.status, answer.text) for answer in steady} == {(200, "abcd")}
    record.add(
        "scaled",
        requests=len(steady) + len(held) + len(later),
        failed=0,
        seconds_up=round(up, 1),
        seconds_down=round(down, 1),
        running_on_three=spread,
    )


def test_a_replica_that_is_scaled_away_finishes_its_requests(
    deploy: Callable[..., Cluster], gate: Any, tmp_path: Path, record: Any
) -> None:
    other = type(gate)(tmp_path / "other")
    cluster = deploy(
        min_replicas=1, max_replicas=3, target_requests=4, upscale_delay=1.0, downscale_delay=2.0, load_window=3.0
    )
    long = {"prompt": other.prompt, "max_tokens": 150}  # so that the output costs more than the common prefix saves
    with streams(cluster, 2, prompt=other.prompt) as held, streams(cluster, 12, prompt=gate.prompt):
        cluster.until(lambda: len(cluster.reports()) == 3)
        with streams(cluster, 1, **long) as one, streams(cluster, 1, **long) as two:
            cluster.until(lambda: all(count > 0 for count in cluster.running().values()))
            gate.open()
            # Two of the three are to go, and each has a request that is held.
            cluster.until(lambda: len(cluster.reports()) == 1)
            other.open()
    assert [(answer.error, answer.text) for answer in held] == [(None, ALPHABET[:20])] * 2
    assert [(answer.error, len(answer.text)) for answer in (*one, *two)] == [(None, 150)] * 2
    seconds = cluster.until(lambda: cluster.num_replicas() == 1)
    record.add("scaled away under load", requests=16, failed=0, seconds_to_exit=round(seconds, 1))


def test_a_disconnect_frees_the_request_and_equal_prefixes_meet(
    deploy: Callable[..., Cluster], gate: Any, record: Any
) -> None:
    cluster = deploy(min_replicas=2, max_replicas=2)
    long_prompt = f"{gate.prompt}"
    assert len(long_prompt) > 64
    with (
        httpx.Client(base_url=cluster.url, timeout=300) as client,
        client.stream("POST", "/v1/completions", json=cluster.body(stream=True, prompt=long_prompt)) as response,
    ):
        next(response.iter_lines())
        cluster.until(lambda: sum(cluster.running().values()) == 1)
    seconds = cluster.until(lambda: sum(cluster.running().values()) == 0)
    with streams(cluster, 3, prompt=long_prompt, max_tokens=2) as together:
        cluster.until(lambda: sum(cluster.running().values()) == 3)
        assert sorted(cluster.running().values()) == [0, 3]
        gate.open()
    assert [answer.text for answer in together] == ["ab"] * 3
    record.add("disconnect", seconds_until_freed=round(seconds, 2))


def test_routes_answer_as_on_one_machine(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(min_replicas=2, max_replicas=2)
    with httpx.Client(base_url=cluster.url, timeout=300) as client:
        health = client.get("/health", params={"deep": 1}).json()
        assert health["status"] == "ok"
        assert [replica["status"] for replica in health["replicas"]] == ["ok", "ok"]
        assert all(replica["step_seconds"] >= 0 for replica in health["replicas"])
        body = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "stop": ["c"], "logprobs": 1}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert choices[0]["text"] == "ab"
        refused = client.post("/v1/completions", json=cluster.body(prompt="refuse me"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert client.post("/v1/completions", json=cluster.body(model="other")).status_code == 404
        chat = client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "say hi"}]}
        )
        assert chat.json()["choices"][0]["message"]["content"] == "hi"
        assert client.get("/metrics").status_code == 200
        metrics = [line for line in client.get("/metrics").text.splitlines() if line.startswith("engine_up{")]
        assert len(metrics) == 1
        assert metrics[0].endswith(" 1.0") or metrics[0].endswith(" 1")
        freed = client.post("/reset_prefix_cache", headers={"authorization": "Bearer admin"}).json()
        assert len(freed["replicas"][0]["engines"]) == 2


def test_the_demo_model_answers_and_reuses_a_prefix(cluster: str, until: Callable[..., float], record: Any) -> None:
    from ray import serve

    from engine.core.config import demo_model
    from engine.server.ray_serve.application import make_application

    config = EngineConfig(
        model=ModelConfig(path=demo_model()),
        executor=ExecutorConfig(device="cpu"),
        cache=CacheConfig(memory="64MB"),
    )
    serve.run(make_application(config, Options(cpus=1)))
    try:
        client = Cluster(cluster, until)
        body = {"model": Path(demo_model()).name, "prompt": "Once upon a time " * 20, "temperature": 0}
        first, second = (client.complete(**body).json() for _ in range(2))
        assert first["choices"][0]["text"] == second["choices"][0]["text"] != ""
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        start, count = time.monotonic(), 20
        for _ in range(count):
            client.complete(**body, max_tokens=1)
        record.add("one token, one client at a time", seconds=round((time.monotonic() - start) / count, 4))
    finally:
        serve.delete("default")


def engine_processes() -> list[int]:
    """The fake engine processes of this machine that replicas of the cluster have started, oldest first."""
    mark = f"ENGINE_TEST_OF_RAY_SERVE={os.environ['ENGINE_TEST_OF_RAY_SERVE']}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if b"fake_engine.py" in (process / "cmdline").read_bytes() and mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except (OSError, ValueError):
            continue
    return sorted(found)
