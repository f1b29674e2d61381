"""A replica of the front end, without Ray and with a fake of Ray's handle of the engines."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import attrs
import httpx
import pytest

from engine.core.config.tree import CacheConfig, EngineConfig
from engine.core.executors import encode
from engine.core.types import CacheInfo, EngineStats, SamplingParams
from engine.server.ray_serve import front_end as module
from engine.server.ray_serve.front_end import FrontEnd
from engine.server.ray_serve.messages import ReplicaState
from engine.server.shared.messages import Started
from engine.server.shared.metrics_table import FRONT_END_PHASES
from tests.server.fake_front_end import ByteTokenizer

SIZES = dict.fromkeys(("weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
STARTED = Started(
    cache=CacheInfo(num_blocks=8, block_size=16, device="cpu", dtype="float32", **SIZES),
    choices=(),
    max_len=256,
    vocab_size=257,
    default_params=SamplingParams(),
    seconds=0.0,
)

Body = Callable[[FrontEnd], Coroutine[Any, Any, None]]


class Result:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Iterator[Any]:
        return self._value
        yield

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> Any:
        return self._value


class Engines:
    """What a front end that generates nothing uses of ray.serve.handle.DeploymentHandle."""

    @property
    def describe(self) -> Any:
        return self

    def remote(self) -> Result:
        return Result(encode(STARTED))

    def options(self, **_: Any) -> Any:
        return None

    def broadcast(self, method: str) -> Result:
        assert method == "report"
        return Result([encode(ReplicaState("r1", EngineStats()))])


@pytest.fixture
def run(
    fake_config: Callable[..., EngineConfig], clear_logs: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """run(body, cache, **ServerConfig fields): runs `body` with a front end that has started."""
    monkeypatch.setattr(gc, "callbacks", [])
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)

    def start(body: Body, cache: CacheConfig | None = None, **server: Any) -> None:
        async def main() -> None:
            clear_logs()
            front_end = FrontEnd.__new__(FrontEnd)
            open_tokenizer: Any = ByteTokenizer.of_model
            config = attrs.evolve(fake_config(**server), cache=cache or CacheConfig())
            await front_end.__init__(encode(config), Engines(), open_tokenizer)  # type: ignore[misc]
            try:
                await body(front_end)
            finally:
                front_end._watching.cancel()
                front_end._client.close()

        asyncio.run(main())

    return start


async def get(front_end: FrontEnd, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(front_end.application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.get(path, headers={"x-request-id": "mine"})


def test_entries_are_json_with_the_ids_of_the_request_when_asked_for(
    run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(front_end: FrontEnd) -> None:
        logging.getLogger("engine.here").warning("broken")
        assert (await get(front_end, "/v1/models")).status_code == 200

    run(body, log_format="json", access_log="json")
    first, access = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["process"]) == ("broken", "front end")
    assert (access["target"], access["status"], access["request_id"]) == ("/v1/models", 200, "mine")
    assert access["logger"] == "engine.server.access"


def test_entries_are_text_of_the_level_asked_for(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    async def body(front_end: FrontEnd) -> None:
        logging.getLogger("engine.here").info("seen")
        logging.getLogger("engine.here").debug("unseen")

    run(body, log_level="info")
    assert " INFO server: seen\n" in capsys.readouterr().err


def test_the_time_of_threads_is_counted_while_the_engines_are_watched(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)

    async def body(front_end: FrontEnd) -> None:
        phases: Any = front_end._client.phases
        phases._clock = iter(range(0, 100, 3)).__next__
        phases.timed_in_thread("tokenize", list)()
        for _ in range(10):
            await asyncio.sleep(0)
        assert front_end._client.metrics.phase_cells[FRONT_END_PHASES.index("tokenize")] == 3

    run(body, phase_times=True)


@pytest.mark.parametrize("freeze", [True, False])
def test_garbage_collections_are_counted_and_leave_out_the_start_when_asked(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, freeze: bool
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))

    async def body(front_end: FrontEnd) -> None:
        assert frozen == [True] * freeze
        assert gc.callbacks == [front_end._client.metrics.gc_pauses._on_collection]

    run(body, gc_freeze=freeze)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_metrics_say_whether_prefixes_are_cached(run: Callable[..., None], prefix_caching: bool) -> None:
    async def body(front_end: FrontEnd) -> None:
        assert f'prefix_caching="{prefix_caching}"' in (await get(front_end, "/metrics")).text

    run(body, cache=CacheConfig(prefix_caching=prefix_caching))


def test_metrics_of_processes_are_those_of_the_front_end_alone(run: Callable[..., None]) -> None:
    async def body(front_end: FrontEnd) -> None:
        text = (await get(front_end, "/metrics")).text
        labels = re.findall(r"^process_start_time_seconds({.*}) ", text, re.MULTILINE)
        assert labels == ['{process="front_end",number="0"}'], "Ray's process is no supervisor"

    run(body)
