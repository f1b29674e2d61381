"""A front end's client of the engine replicas, with a fake of Ray's handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from engine.core.config.tree import EngineConfig
from engine.core.executors import MessageDecoder, encode
from engine.core.types import Output, Request, SamplingParams
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import RequestGroup
from engine.server.ray_serve import ray_link
from engine.server.ray_serve.messages import Answer, Declined, Ended, Produced, Run, Stop
from engine.server.ray_serve.ray_link import RayClient
from engine.server.shared.messages import Outputs
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable

Script = Callable[[Run], AsyncIterator[Answer]]


def produced(*outputs: tuple[int, tuple[int, ...], str | None]) -> Produced:
    full = [(choice, Output(request="r", tokens=tokens, finish_reason=reason)) for choice, tokens, reason in outputs]
    return Produced(Outputs([], [], [], full))


class Stream:
    def __init__(self, answers: AsyncIterator[Answer]) -> None:
        self._answers = answers
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        return encode(await anext(self._answers))

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """What the link uses of ray.serve.handle.DeploymentHandle."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.streams: list[Stream] = []
        self.stops: list[Stop] = []

    def options(self, method_name: str, stream: bool = False) -> Any:
        return self if stream else _Stops(self.stops)

    def remote(self, call: Any) -> Stream:
        call.replica = "replica"
        run = MessageDecoder[Run](Run).decode(call.message)
        self.streams.append(Stream(self._scripts.pop(0)(run)))
        return self.streams[-1]


class _Stops:
    def __init__(self, stops: list[Stop]) -> None:
        self._stops = stops

    def remote(self, call: Any) -> None:
        self._stops.append(MessageDecoder[Stop](Stop).decode(call.message))


def request(max_tokens: int = 3) -> Request:
    return Request(id="r", prompt=(1, 2, 3), params=SamplingParams(max_tokens=max_tokens))


def run(handle: Handle, body: Callable[[RayClient], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        table = MetricsTable([memoryview(bytearray(8 * FrontEndMetrics.size(1))).cast("d")])
        client = RayClient(EngineConfig(), table, handle, lambda: None)
        try:
            await body(client)
            assert client.metrics.open_requests == 0
            assert table.loads == [0.0]
        finally:
            client.close()

    asyncio.run(main())


async def take_all(group: RequestGroup) -> None:
    """Take events until there is an error."""
    while True:
        await group.next()


async def finish(client: RayClient, choices: int = 1) -> list[tuple[int, tuple[int, ...]]]:
    """(index, tokens) of all events of a group of one request."""
    events: list[tuple[int, tuple[int, ...]]] = []
    finished = 0
    with client.submit([request()], choices) as group:
        while finished < choices:
            for index, tokens, output in await group.next():
                events.append((index, tuple(tokens)))
                finished += output is not None and output.finish_reason is not None
    return events


def test_the_answers_of_a_call_are_the_events_of_its_requests() -> None:
    async def script(run: Run) -> AsyncIterator[Answer]:
        assert (run.request.prompt, run.choices) == ((1, 2, 3), 2)
        yield produced((0, (7,), None), (1, (8,), None))
        yield Produced(Outputs([1, 0], [2, 1], [4, 5, 6], []))
        yield produced((1, (9,), "stop"))
        yield produced((0, (), "length"))

    async def body(client: RayClient) -> None:
        expected = [(0, (7,)), (1, (8,)), (1, (4, 5)), (0, (6,)), (1, (9,)), (0, ())]
        assert await finish(client, choices=2) == expected
        assert await finish(client, choices=2) == expected  # whose numbers are others

    run(Handle(script, script), body)


async def died(run: Run) -> AsyncIterator[Answer]:
    yield produced((0, (7,), None))
    raise RuntimeError("the first line\nthe replica is gone")


async def refused(run: Run) -> AsyncIterator[Answer]:
    yield Ended(400, "too long", "context_length_exceeded")


async def short(run: Run) -> AsyncIterator[Answer]:
    yield produced((0, (7,), None))


@pytest.mark.parametrize(
    ("script", "status", "code", "message"),
    [
        (died, 503, "engine_failed", "a replica of the engine failed: the replica is gone; "),
        (refused, 400, "context_length_exceeded", "too long"),
        (short, 503, "engine_failed", "a replica of the engine failed: its answer ended early; "),
    ],
)
def test_a_call_that_fails_ends_its_requests_with_the_reason(
    script: Script, status: int, code: str, message: str
) -> None:
    async def body(client: RayClient) -> None:
        with pytest.raises(ApiError, match=message) as caught:
            await finish(client)
        assert (caught.value.status, caught.value.code) == (status, code)

    run(Handle(script), body)


def test_a_declined_call_goes_to_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_link, "DECLINED_PAUSE", 0.0)

    async def decline(run: Run) -> AsyncIterator[Answer]:
        yield Declined("full", "it is down")

    async def answer(run: Run) -> AsyncIterator[Answer]:
        yield produced((0, (7,), "length"))

    async def body(client: RayClient) -> None:
        assert await finish(client) == [(0, (7,))]

    run(Handle(decline, decline, answer), body)


def test_a_call_that_all_replicas_decline_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_link, "DECLINED_PAUSE", 0.0)

    def decline(name: str) -> Script:
        async def script(run: Run) -> AsyncIterator[Answer]:
            yield Declined(name, "it is down")

        return script

    async def body(client: RayClient) -> None:
        with pytest.raises(ApiError, match="it is down"):
            await finish(client)

    run(Handle(*(decline(str(number)) for number in range(ray_link.MAX_DECLINED))), body)


async def endless(run: Run) -> AsyncIterator[Answer]:
    yield produced(*((choice, (7,), None) for choice in range(run.choices)))
    await asyncio.Event().wait()


def test_leaving_a_group_cancels_its_call() -> None:
    handle = Handle(endless)

    async def body(client: RayClient) -> None:
        with client.submit([request()]) as group:
            await group.next()
        while not handle.streams[0].cancelled:
            await asyncio.sleep(0)

    run(handle, body)


def test_an_abort_of_one_choice_stops_it_at_its_replica_and_of_the_last_cancels_the_call() -> None:
    handle = Handle(endless)

    async def body(client: RayClient) -> None:
        with client.submit([request()], 3) as group:
            await group.next()
            group.abort(1)
            while not handle.stops:
                await asyncio.sleep(0)
            assert handle.stops[0].choices == (1,)
            assert not handle.streams[0].cancelled
            group.abort(0)
            group.abort(2)
            while not handle.streams[0].cancelled:
                await asyncio.sleep(0)

    run(handle, body)


def test_a_failed_call_ends_all_requests_of_its_group() -> None:
    handle = Handle(endless, died)

    async def body(client: RayClient) -> None:
        with pytest.raises(ApiError, match="the replica is gone"), client.submit([request(), request()]) as group:
            await take_all(group)
        while not handle.streams[0].cancelled:
            await asyncio.sleep(0)

    run(handle, body)
