"""EngineClient with a real engine process around the fake engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.core.config.tree import EngineConfig
from engine.core.executors import encode
from engine.core.types import Request, SamplingParams
from engine.server.front_end.engine_client import MAX_TOKENS, EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import OutputEvent, RequestGroup
from engine.server.front_end.routing import MAX_OUTPUT_COST
from engine.server.shared.messages import (
    Abort,
    Add,
    EngineDown,
    EngineLaunch,
    EngineToSupervisor,
    Failed,
    FrontEndExited,
    Launch,
    Shutdown,
    Started,
)
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable
from engine.server.supervisor.child import Child

Body = Callable[..., Coroutine[Any, Any, None]]


def request(name: str, max_tokens: int = 3, prompt: bytes = b"abc", **params: Any) -> Request:
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, **params))


async def collect(group: RequestGroup, count: int) -> list[OutputEvent]:
    """All events until `count` requests have finished."""
    news: list[OutputEvent] = []
    while sum(output is not None and output.finish_reason is not None for _, _, output in news) < count:
        news += await group.next()
    return news


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def record_messages(client: EngineClient) -> list[tuple[type, int]]:
    """(type, size) of each message that the client sends from now on."""
    link, sent = client.links[0], list[tuple[type, int]]()
    send = link.send

    def record(message: Any) -> None:
        sent.append((type(message), len(encode(message))))
        send(message)

    link.send = record  # type: ignore[method-assign]
    return sent


def metrics_table(rows: int = 1) -> MetricsTable:
    return MetricsTable([memoryview(array("d", [0.0] * FrontEndMetrics.size(1))) for _ in range(rows)])


def observed(client: EngineClient, name: str) -> int:
    """Number of values in a histogram of the only replica's requests."""
    return sum(client.metrics.replicas[0].histograms[name].snapshot().counts)


@pytest.fixture
def run(fake_config: Callable[..., EngineConfig], fake_command: list[str]) -> Callable[..., None]:
    """Runs a test with a started engine process and `fronts` clients."""

    def start(body: Body, fronts: int = 1, **kwargs: Any) -> None:
        config = fake_config(**kwargs)

        async def follow(
            child: Child[EngineToSupervisor], clients: list[EngineClient], started: asyncio.Future[Started]
        ) -> None:
            words = ""
            async for message in child.messages():
                match message:
                    case Started():
                        started.set_result(message)
                    case Failed(error):
                        words = error
            for client in clients:
                client.mark_down(EngineDown(words or child.exit_status, 0.0))

        async def main(directory: str) -> None:
            child = await Child[EngineToSupervisor].start(
                fake_command, EngineToSupervisor, Launch(config=config, directory=directory)
            )
            shared, started = metrics_table(fronts), asyncio.get_running_loop().create_future()
            clients = [EngineClient(config, shared, row) for row in range(fronts)]
            following = asyncio.create_task(follow(child, clients, started))
            try:
                first = await started
                for row, client in enumerate(clients):
                    client.connect(directory, f"{row}.1", first)
                await body(*clients, child) if fronts > 1 else await body(*clients)
                if not following.done():
                    child.send(Shutdown())
                    await asyncio.wait_for(following, 30)
            finally:
                following.cancel()
                for client in clients:
                    client.close()
                child.kill_and_reap()

        directory = tempfile.mkdtemp(prefix="engine-")
        try:
            asyncio.run(main(directory))
        finally:
            shutil.rmtree(directory)

    return start


def test_outputs_arrive_in_order(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 3), request("b", 5)]) as group:
            news = await collect(group, 2)
        tokens = {index: b"".join(bytes(made) for i, made, _ in news if i == index) for index in (0, 1)}
        assert tokens == {0: b"abc", 1: b"abcde"}
        whole = [(index, made) for index, made, output in news if output is None]
        assert whole == [(0, [98]), (1, [98]), (1, [99]), (1, [100])]  # the first and the last come in full
        assert client.metrics.finished["length"] == 2
        assert client.metrics.open_requests == 0
        assert client.metrics_table.loads == [0]
        assert observed(client, "time_to_first_token_seconds") == 2
        assert observed(client, "inter_token_latency_seconds") == 2 + 4

    run(body)


def test_logprobs_come_with_every_token(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 4, logprobs=1)]) as group:
            news = await collect(group, 1)
        assert [output.logprobs[0].token for _, _, output in news if output is not None] == list(b"abcd")

    run(body)


def test_a_refused_request_yields_an_error_output(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", prompt=b"refuse me")]) as group:
            ((_, tokens, output),) = await collect(group, 1)
        assert output is not None
        assert (tuple(tokens), output.finish_reason) == ((), "error")
        assert output.error == "this prompt is refused by the engine"

    run(body)


def test_a_request_ended_by_a_stop_string_counts_as_finished(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 10_000)]) as group:
            await group.next()
            group.abort(0, "stop")
        assert client.metrics.finished["stop"] == 1
        assert client.metrics.finished["abort"] == 1
        assert observed(client, "e2e_request_latency_seconds") == 1

    run(body)


def test_leaving_a_group_aborts_its_running_requests(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 7)]) as group:
            assert client.metrics_table.loads == [len(b"abc") + MAX_OUTPUT_COST + 7]  # both share one prompt
            await group.next()
            assert client.metrics_table.loads == [MAX_OUTPUT_COST + 7]
        assert client.metrics.finished["abort"] == 2
        assert client.metrics_table.loads == [0]
        await until(
            lambda: client.links[0].stats.steps > 0 and client.links[0].stats.running == 0
        )  # statistics come when the engine goes idle

    run(body, options={"delay": 0.001})


def test_what_choices_share_is_sent_once(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        sent = record_messages(client)
        prompt = bytes(200)
        with client.submit([request("a", prompt=prompt, seed=1), request("b")], choices=64) as group:
            news = await collect(group, 128)
        ((_, size),) = sent
        assert size < 4 * len(prompt) + 1000
        tokens = {index: b"".join(bytes(made) for i, made, _ in news if i == index) for index in range(128)}
        assert [tokens[index] for index in (0, 1, 63, 64, 127)] == [b"bcd", b"cde", b"mno", b"abc", b"abc"]
        assert client.metrics.finished["length"] == 128
        assert client.metrics_table.loads == [0]

    run(body)


def test_long_prompts_are_sent_in_several_messages(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        sent = record_messages(client)
        long = bytes(MAX_TOKENS // 2)
        with client.submit([request(str(index), 2, long) for index in range(5)], choices=2) as group:
            news = await collect(group, 10)
        assert [kind for kind, _ in sent] == [Add] * 3
        assert {index for index, _, _ in news} == set(range(10))

    run(body)


def test_all_choices_of_a_group_are_aborted_by_one_message(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)], choices=50) as group:
            while {index for index, _, _ in group.take()} != set(range(50)):
                await asyncio.sleep(0.01)
            sent = record_messages(client)
            group.abort(7, "stop")
        await until(lambda: bool(sent))
        assert [kind for kind, _ in sent] == [Abort]
        assert client.metrics.finished["stop"] == 1
        assert client.metrics.finished["abort"] == 49
        await until(lambda: client.links[0].stats.running == 0)

    run(body, options={"delay": 0.02})


def test_a_listener_is_called_once_per_batch_of_outputs(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        calls: list[list[OutputEvent]] = []
        written: list[bytes] = []
        with client.submit([request("a", 20), request("b", 20)]) as group:

            def take() -> None:
                calls.append(group.take())
                client.write_later(written.append, b"%d" % len(calls))
                assert len(written) < len(calls), "writes come after all listeners"

            group.listen(take)
            await until(lambda: sum(map(len, calls)) == 40)
        assert all(calls)
        assert written == [b"%d" % number for number in range(1, len(calls) + 1)]

    run(body, options={"delay": 0.001})


def test_max_waiting_limits_the_open_requests_of_all_front_ends(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, _: Any) -> None:
        with client.submit([request("a", 10_000)]), other.submit([request("b", 10_000)]):
            with pytest.raises(ApiError, match="has 2 open requests and accepts at most 3") as caught:
                client.submit([request("c"), request("d")])
            assert caught.value.status == 503
            assert caught.value.headers["retry-after"] == "1"
            client.submit([request("c")])
        with client.submit([request("d"), request("e")]) as group:
            await collect(group, 2)

    run(body, fronts=2, options={"delay": 0.001}, max_waiting=3)


def test_front_ends_receive_their_own_outputs_and_all_statistics(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, _: Any) -> None:
        with client.submit([request("a", 3)]) as mine, other.submit([request("b", 5), request("c", 2)]) as others:
            assert len(await collect(mine, 1)) == 3
            assert len(await collect(others, 2)) == 7
        await until(
            lambda: client.links[0].stats == other.links[0].stats and client.links[0].stats.generation_tokens == 10
        )

    run(body, fronts=2)


def test_requests_of_an_exited_front_end_are_aborted(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, engine: Child[EngineToSupervisor]) -> None:
        with client.submit([request("a", 10_000)]) as group, other.submit([request("b", 10_000)]) as alive:
            await group.next()
            await until(lambda: client.links[0].stats.running == 2)
            engine.send(FrontEndExited("0.1"))
            await until(lambda: other.links[0].stats.running == 1)
            client.submit([request("late", 10_000)])  # its messages may be read after its exit was reported
            await alive.next()
            await asyncio.sleep(0.3)
            assert other.links[0].stats.running == 1

    run(body, fronts=2, options={"delay": 0.001})


def test_open_requests_fail_when_the_engine_process_is_killed(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="killed by SIGKILL"):
            await collect(group, 1)
        assert client.links[0].down is not None
        assert client.metrics.finished["error"] == 1
        assert client.metrics_table.loads == [0]
        with pytest.raises(ApiError, match="SIGKILL"):
            client.submit([request("b")])

    run(body, options={"die_after": 3, "delay": 0.01})


def test_requests_to_an_exited_engine_process_do_not_reach_its_successor(
    fake_config: Callable[..., EngineConfig], fake_command: list[str], tmp_path: Path
) -> None:
    config = fake_config(options={"delay": 0.001})

    async def live(incarnation: int) -> tuple[Child[EngineToSupervisor], Started]:
        launch = EngineLaunch(config=config, directory=str(tmp_path), incarnation=incarnation)
        child = await Child[EngineToSupervisor].start(fake_command, EngineToSupervisor, launch)
        started = await anext(child.messages())
        assert isinstance(started, Started)
        return child, started

    async def main() -> None:
        client = EngineClient(config, metrics_table(), 0)
        first, started = await live(0)
        client.connect(str(tmp_path), "0.1", started)
        with client.submit([request("a", 10_000)]) as running:
            await running.next()
            first.kill_and_reap()
            with client.submit([request("b", 10_000)]) as unheard:  # the client does not know yet
                second, successor = await live(1)
                client.mark_down(EngineDown("it was killed", 0.0, will_restart=True))
                for group in (running, unheard):
                    with pytest.raises(ApiError, match="it is being restarted, so try again later"):
                        await collect(group, 1)
                client.connect(str(tmp_path), "0.1", successor)
        try:
            assert client.links[0].incarnation == 1
            assert client.links[0].down is None
            with client.submit([request("c", 3)]) as group:
                assert len(await collect(group, 1)) == 3
            await until(lambda: client.links[0].stats.generation_tokens > 0)
            assert client.links[0].stats.generation_tokens == 3
            assert client.links[0].stats.running == 0
        finally:
            client.close()
            second.kill_and_reap()

    asyncio.run(main())


def test_a_failed_step_fails_requests_with_its_error(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="the fake step failed"):
            await collect(group, 1)

    run(body, options={"raise_after": 3})


def test_the_engine_process_ignores_sigint(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, _: EngineClient, engine: Child[EngineToSupervisor]) -> None:
        os.kill(engine.pid, signal.SIGINT)
        with client.submit([request("a")]) as group:
            assert len(await collect(group, 1)) == 3

    run(body, fronts=2)


def test_fail_ends_all_open_requests_with_one_error(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group:
            await group.next()
            client.fail(ApiError(503, "enough"))
            with pytest.raises(ApiError, match="enough"):
                await collect(group, 1)
        with client.submit([request("b")]) as group:  # the engine itself is healthy
            await collect(group, 1)

    run(body, options={"delay": 0.001})
