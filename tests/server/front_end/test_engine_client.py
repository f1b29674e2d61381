"""The client against a real process with a fake engine."""

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
from engine.core.types import Request, SamplingParams
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import Group, News
from engine.server.front_end.routing import ANSWER_TOKENS
from engine.server.shared.messages import EngineGone, EngineLaunch, Failed, FromEngine, Gone, Launch, Shutdown, Started
from engine.server.shared.metrics_table import Board, Metrics
from engine.server.supervisor.child import Child

Body = Callable[..., Coroutine[Any, Any, None]]


def request(name: str, max_tokens: int = 3, prompt: bytes = b"abc", **params: Any) -> Request:
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, **params))


async def collect(group: Group, count: int) -> list[News]:
    """All that comes until `count` requests have finished."""
    news: list[News] = []
    while sum(output is not None and output.finish_reason is not None for _, _, output in news) < count:
        news += await group.next()
    return news


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def board(rows: int = 1) -> Board:
    return Board([memoryview(array("d", [0.0] * (Metrics.SIZE + 1))) for _ in range(rows)])


@pytest.fixture
def run(fake_config: Callable[..., EngineConfig], fake_command: list[str]) -> Callable[..., None]:
    """Runs a test with a started engine process and as many clients as there are `fronts`."""

    def start(body: Body, fronts: int = 1, **kwargs: Any) -> None:
        config = fake_config(**kwargs)

        async def follow(
            child: Child[FromEngine], clients: list[EngineClient], started: asyncio.Future[Started]
        ) -> None:
            words = ""
            async for message in child.messages():
                match message:
                    case Started():
                        started.set_result(message)
                    case Failed(error):
                        words = error
            for client in clients:
                client.bury(EngineGone(words or child.fate, 0.0))

        async def main(directory: str) -> None:
            child = await Child[FromEngine].start(fake_command, FromEngine, Launch(config=config, directory=directory))
            shared, started = board(fronts), asyncio.get_running_loop().create_future()
            clients = [EngineClient(config, shared, row) for row in range(fronts)]
            following = asyncio.create_task(follow(child, clients, started))
            try:
                first = await started
                for row, client in enumerate(clients):
                    client.open(directory, f"{row}.1", first)
                await body(*clients, child) if fronts > 1 else await body(*clients)
                if not following.done():
                    child.send(Shutdown())
                    await asyncio.wait_for(following, 10)
            finally:
                following.cancel()
                for client in clients:
                    client.close()
                child.kill()

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
        assert whole == [(0, [98]), (1, [98]), (1, [99]), (1, [100])]  # neither the first nor the last is plain
        assert client.metrics.finished["length"] == 2
        assert client.metrics.under_way == 0
        assert client.board.loads == [0]
        assert client.metrics.first_token.buckets()[-1] == ("+Inf", 2)
        assert client.metrics.inter_token.buckets()[-1] == ("+Inf", 2 + 4)

    run(body)


def test_log_probabilities_come_with_every_token(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 4, logprobs=1)]) as group:
            news = await collect(group, 1)
        assert [output.logprobs[0].token for _, _, output in news if output is not None] == list(b"abcd")

    run(body)


def test_a_request_the_engine_refuses_is_an_output(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", prompt=b"refuse me")]) as group:
            ((_, tokens, output),) = await collect(group, 1)
        assert output is not None
        assert (tuple(tokens), output.finish_reason) == ((), "error")
        assert output.error == "this prompt is refused by the engine"

    run(body)


def test_a_stop_string_finishes_a_request_and_its_duration_counts(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 10_000)]) as group:
            await group.next()
            group.abort(0, "stop")
        assert client.metrics.finished["stop"] == 1
        assert client.metrics.finished["abort"] == 1
        assert client.metrics.end_to_end.buckets()[-1] == ("+Inf", 1)

    run(body)


def test_leaving_the_group_aborts_what_runs(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000), request("b", 7)]) as group:
            assert client.board.loads == [len(b"abc") + ANSWER_TOKENS + 7]  # one prompt, which both share
            await group.next()
            assert client.board.loads == [ANSWER_TOKENS + 7]
        assert client.metrics.finished["abort"] == 2
        assert client.board.loads == [0]
        await until(
            lambda: client.links[0].stats.steps > 0 and client.links[0].stats.running == 0
        )  # told when the engine goes idle

    run(body, options={"delay": 0.001})


def test_a_listener_is_called_once_for_all_that_has_come(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        calls: list[list[News]] = []
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


def test_no_more_requests_than_allowed_in_all_front_ends(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, _: Any) -> None:
        with client.submit([request("a", 10_000)]), other.submit([request("b", 10_000)]):
            with pytest.raises(ApiError, match="has 2 requests under way and takes at most 3") as caught:
                client.submit([request("c"), request("d")])
            assert caught.value.status == 503
            assert caught.value.headers["retry-after"] == "1"
            client.submit([request("c")])
        with client.submit([request("d"), request("e")]) as group:
            await collect(group, 2)

    run(body, fronts=2, options={"delay": 0.001}, max_waiting=3)


def test_each_front_end_gets_its_own_outputs_and_all_get_statistics(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, _: Any) -> None:
        with client.submit([request("a", 3)]) as mine, other.submit([request("b", 5), request("c", 2)]) as others:
            assert len(await collect(mine, 1)) == 3
            assert len(await collect(others, 2)) == 7
        await until(
            lambda: client.links[0].stats == other.links[0].stats and client.links[0].stats.generation_tokens == 10
        )

    run(body, fronts=2)


def test_a_dead_front_ends_requests_are_forgotten(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, other: EngineClient, engine: Child[FromEngine]) -> None:
        with client.submit([request("a", 10_000)]) as group, other.submit([request("b", 10_000)]) as alive:
            await group.next()
            await until(lambda: client.links[0].stats.running == 2)
            engine.send(Gone("0.1"))
            await until(lambda: other.links[0].stats.running == 1)
            client.submit([request("late", 10_000)])  # what it said before may be read afterwards
            await alive.next()
            await asyncio.sleep(0.3)
            assert other.links[0].stats.running == 1

    run(body, fronts=2, options={"delay": 0.001})


def test_a_killed_process_fails_open_requests(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="killed by SIGKILL"):
            await collect(group, 1)
        assert client.links[0].failure is not None
        assert client.metrics.finished["error"] == 1
        assert client.board.loads == [0]
        with pytest.raises(ApiError, match="SIGKILL"):
            client.submit([request("b")])

    run(body, options={"die_after": 3, "delay": 0.01})


def test_nothing_of_what_the_dead_were_asked_reaches_their_successor(
    fake_config: Callable[..., EngineConfig], fake_command: list[str], tmp_path: Path
) -> None:
    config = fake_config(options={"delay": 0.001})

    async def live(life: int) -> tuple[Child[FromEngine], Started]:
        launch = EngineLaunch(config=config, directory=str(tmp_path), life=life)
        child = await Child[FromEngine].start(fake_command, FromEngine, launch)
        started = await anext(child.messages())
        assert isinstance(started, Started)
        return child, started

    async def main() -> None:
        client = EngineClient(config, board(), 0)
        first, started = await live(0)
        client.open(str(tmp_path), "0.1", started)
        with client.submit([request("a", 10_000)]) as running:
            await running.next()
            first.kill()
            with client.submit([request("b", 10_000)]) as unheard:  # nobody has told the client yet
                second, successor = await live(1)
                client.bury(EngineGone("it was killed", 0.0, coming=True))
                for group in (running, unheard):
                    with pytest.raises(ApiError, match="it is started anew, so try again later"):
                        await collect(group, 1)
                client.open(str(tmp_path), "0.1", successor)
        try:
            assert client.links[0].life == 1
            assert client.links[0].failure is None
            with client.submit([request("c", 3)]) as group:
                assert len(await collect(group, 1)) == 3
            await until(lambda: client.links[0].stats.generation_tokens > 0)
            assert client.links[0].stats.generation_tokens == 3
            assert client.links[0].stats.running == 0
        finally:
            client.close()
            second.kill()

    asyncio.run(main())


def test_a_failed_step_is_told_in_its_own_words(run: Callable[..., None]) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([request("a", 10_000)]) as group, pytest.raises(ApiError, match="the fake step failed"):
            await collect(group, 1)

    run(body, options={"raise_after": 3})


def test_interrupts_do_not_reach_the_engine(run: Callable[..., None]) -> None:
    async def body(client: EngineClient, _: EngineClient, engine: Child[FromEngine]) -> None:
        os.kill(engine.pid, signal.SIGINT)
        with client.submit([request("a")]) as group:
            assert len(await collect(group, 1)) == 3

    run(body, fronts=2)


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
