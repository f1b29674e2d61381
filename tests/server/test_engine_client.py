"""The client against a real process with a fake engine."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.types import Output, Request, SamplingParams
from engine.server.engine_client import EngineClient, Group
from engine.server.errors import ApiError
from engine.server.metrics import Metrics

Run = Callable[[Callable[[EngineClient], Coroutine[Any, Any, None]]], None]


def request(name: str, max_tokens: int = 3, prompt: bytes = b"abc") -> Request:
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=max_tokens))


async def collect(group: Group, count: int) -> list[Output]:
    """All outputs until `count` requests have finished."""
    outputs: list[Output] = []
    while sum(output.finish_reason is not None for output in outputs) < count:
        outputs += await group.next()
    return outputs


@pytest.fixture
def run(fake_config: Callable[..., EngineConfig], fake_command: list[str]) -> Callable[..., None]:
    """Runs a test with a started client, and checks that nothing is left behind."""

    def start(
        body: Callable[[EngineClient], Coroutine[Any, Any, None]],
        command: Sequence[str] = tuple(fake_command),
        **kwargs: Any,
    ) -> None:
        async def main() -> None:
            client = EngineClient(fake_config(**kwargs), Metrics(), command)
            try:
                await client.start()
                await body(client)
            finally:
                await client.close()

        before = set(glob.glob(f"{tempfile.gettempdir()}/engine-*"))
        asyncio.run(main())
        assert set(glob.glob(f"{tempfile.gettempdir()}/engine-*")) <= before

    return start


def test_outputs_arrive_in_order(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 3), request("b", 5)]) as group:
            outputs = await collect(group, 2)
        tokens = {name: b"".join(bytes(o.tokens) for o in outputs if o.request == name) for name in "ab"}
        assert tokens == {"a": b"abc", "b": b"abcde"}
        assert client.metrics.finished["length"] == 2
        assert client.metrics.first_token.buckets()[-1] == ("+Inf", 2)
        assert client.metrics.inter_token.buckets()[-1] == ("+Inf", 2 + 4)

    run(body)


def test_a_request_the_engine_refuses_is_an_output(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", prompt=b"refuse me")]) as group:
            (output,) = await collect(group, 1)
        assert output.finish_reason == "error"
        assert output.error == "this prompt is refused by the engine"

    run(body)


def test_leaving_the_group_aborts_what_runs(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 10_000)]) as group:
            await group.next()
        assert client.metrics.finished["abort"] == 2
        while client.stats.running or not client.stats.steps:  # the last statistics come when the engine goes idle
            await asyncio.sleep(0.01)

    run(body, options={"delay": 0.001})


def test_no_more_requests_than_allowed(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 10_000)]):
            with pytest.raises(ApiError, match="takes at most 3") as caught:
                client.submit([request("c"), request("d")])
            assert caught.value.status == 503
            assert caught.value.headers["retry-after"] == "1"
            client.submit([request("c")])
        with client.submit([request("d"), request("e")]) as group:
            await collect(group, 2)

    run(body, options={"delay": 0.001}, max_waiting=3)


def test_a_killed_process_fails_open_requests(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="killed by SIGKILL"):
            await collect(group, 1)
        assert client.failure is not None
        assert "SIGKILL" in client.failure.reason
        with pytest.raises(ApiError, match="SIGKILL"):
            client.submit([request("b")])

    run(body, options={"die_after": 3, "delay": 0.01})


def test_a_failed_step_is_told_in_its_own_words(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="the fake step failed"):
            await collect(group, 1)

    run(body, options={"raise_after": 3})


def test_an_engine_that_cannot_start_says_why(run: Callable[..., None]) -> None:
    async def never(client: EngineClient) -> None:
        raise AssertionError

    with pytest.raises(EngineError, match=r"^there is not enough memory$"):
        run(never, options={"start_error": "there is not enough memory"})


def test_a_process_that_dies_at_start(run: Callable[..., None]) -> None:
    async def never(client: EngineClient) -> None:
        raise AssertionError

    with pytest.raises(EngineError, match="could not start: its process exited with code 3"):
        run(never, command=(sys.executable, "-c", "import sys; sys.exit(3)"))


def test_interrupts_do_not_reach_the_engine(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGINT)
        with client.submit([request("a")]) as group:
            assert len(await collect(group, 1)) == 3

    run(body)


def test_one_error_ends_all_open_requests(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group:
            await group.next()
            client.fail(ApiError(503, "enough"))
            with pytest.raises(ApiError, match="enough"):
                await collect(group, 1)
        with client.submit([request("b")]) as group:  # the engine itself is well
            await collect(group, 1)

    run(body, options={"delay": 0.001})
