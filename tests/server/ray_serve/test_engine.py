"""The engine replica, without Ray, around an engine process with the fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.config.tree import EngineConfig
from engine.core.errors import EngineError
from engine.core.executors import MessageDecoder, encode
from engine.core.types import Output, Request, SamplingParams
from engine.server.ray_serve.engine import EngineDeployment, EngineReplica, batches
from engine.server.ray_serve.messages import Answer, Declined, Ended, Produced, ReplicaState, Run, Stop
from engine.server.shared.messages import Started

Body = Callable[[EngineReplica], Coroutine[Any, Any, None]]


@pytest.fixture
def run(fake_config: Callable[..., EngineConfig], fake_command: list[str]) -> Callable[..., None]:
    """run(body, **options of the fake engine): runs `body` with a replica that has started."""

    def start(body: Body, **options: Any) -> None:
        async def main() -> None:
            replica = EngineReplica(fake_config(options=options), fake_command, "r1")
            await replica.start()
            try:
                await asyncio.wait_for(body(replica), 60)
            finally:
                await replica.close()

        asyncio.run(main())

    return start


def message(max_tokens: int = 3, choices: int = 1, prompt: bytes = b"abc") -> bytes:
    params = SamplingParams(max_tokens=max_tokens)
    return encode(Run("ticket", Request(id="r", prompt=tuple(prompt), params=params), choices))


async def answers(replica: EngineReplica, run: bytes) -> list[Answer]:
    decoder: MessageDecoder[Answer] = MessageDecoder(Answer)
    return [decoder.decode(data) async for data in replica.generate(run)]


def tokens(all_answers: list[Answer]) -> dict[int, list[int]]:
    """The tokens of each choice, in order."""
    made: dict[int, list[int]] = {}
    for answer in all_answers:
        assert isinstance(answer, Produced)
        outputs, at = answer.outputs, 0
        for choice, count in zip(outputs.numbers, outputs.counts, strict=True):
            made.setdefault(choice, []).extend(outputs.tokens[at : at + count])
            at += count
        for choice, output in outputs.full:
            made.setdefault(choice, []).extend(output.tokens)
    return made


async def report(replica: EngineReplica) -> ReplicaState:
    return MessageDecoder[ReplicaState](ReplicaState).decode(await replica.report())


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.01)


def test_a_run_yields_the_tokens_of_all_choices(run: Callable[..., None]) -> None:
    async def body(replica: EngineReplica) -> None:
        assert tokens(await answers(replica, message(4))) == {0: list(b"abcd")}
        several = tokens(await answers(replica, message(30, choices=3)))
        assert [len(several[choice]) for choice in range(3)] == [30] * 3
        assert MessageDecoder[Started](Started).decode(await replica.describe()).max_len == 256
        assert await replica.record_routing_stats() == {"blocks": 100}
        probed = MessageDecoder[ReplicaState](ReplicaState).decode(await replica.probe())
        assert probed.fault is None
        assert probed.step_seconds is not None
        await replica.check_health()
        refused = await answers(replica, message(prompt=b"refuse me"))
        assert isinstance(refused[0], Produced)
        assert refused[0].outputs.full[0][1].error == "this prompt is refused by the engine"

    run(body)


def test_a_cancelled_run_frees_its_requests_and_a_stop_a_choice(run: Callable[..., None], gate: Any) -> None:
    async def body(replica: EngineReplica) -> None:
        async def running(count: int) -> bool:
            return (await report(replica)).stats.running == count

        task = asyncio.create_task(answers(replica, message(20, choices=3)))
        await until(lambda: running(3))
        await replica.stop(encode(Stop("ticket", (0, 2))))
        await until(lambda: running(1))
        await replica.stop(encode(Stop("another", (0,))))
        task.cancel()
        await until(lambda: running(0))

    run(body, **gate.options)


def test_a_dead_engine_process_ends_its_requests_and_the_replica_declines_others(
    run: Callable[..., None], gate: Any
) -> None:
    async def body(replica: EngineReplica) -> None:
        task = asyncio.create_task(answers(replica, message(20)))

        async def is_running() -> bool:
            return (await report(replica)).stats.running == 1

        await until(is_running)
        child = replica._engines._replicas[0].child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        *_, last = await task
        assert isinstance(last, Ended)
        assert (last.status, last.code) == (503, "engine_failed")
        assert "was killed by SIGKILL" in last.message
        (declined,) = await answers(replica, message())
        assert isinstance(declined, Declined)
        assert declined.replica == "r1"
        fault = (await report(replica)).fault
        assert fault is not None
        assert fault.level == "process"
        with pytest.raises(RuntimeError, match="the engine failed: its process was killed by SIGKILL"):
            await replica.check_health()

    run(body, **gate.options)


def test_an_engine_that_cannot_start_fails_the_replica(run: Callable[..., None]) -> None:
    async def body(replica: EngineReplica) -> None:
        raise AssertionError

    with pytest.raises(EngineError, match="no room here"):
        run(body, start_error="no room here")


def test_events_of_a_choice_stay_in_order() -> None:
    def whole(token: int) -> Output:
        return Output(request="r", tokens=(token,))

    events = [(0, (1,), whole(1)), (1, (2,), None), (0, (3, 4), None), (0, (5,), whole(5)), (1, (6,), whole(6))]
    made = list(batches(events, {1: (b"slice",)}))
    assert tokens([Produced(outputs) for outputs in made]) == {0: [1, 3, 4, 5], 1: [2, 6]}
    assert len(made) == 2
    assert [one.number for outputs in made for one in outputs.prompt_logprobs] == [1]


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_replicas_entries_have_the_form_and_level_asked_for(
    fake_config: Callable[..., EngineConfig],
    fake_command: list[str],
    clear_logs: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    style: str,
) -> None:
    context = SimpleNamespace(replica_tag="r1")
    serve = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", cast("Any", SimpleNamespace(serve=serve)))

    class Deployment(EngineDeployment):
        def __del__(self) -> None:  # type: ignore[override]
            """Nothing: only Ray Serve awaits the base class's."""

    async def main() -> None:
        clear_logs()
        replica = Deployment.__new__(Deployment)
        config = fake_config(log_format=style, log_level="info")
        await replica.__init__(encode(config), fake_command)  # type: ignore[misc]
        await replica.close()
        logging.getLogger("engine.here").info("seen")

    asyncio.run(main())
    last = capsys.readouterr().err.splitlines()[-1]
    if style == "json":
        found = json.loads(last)
        assert (found["message"], found["process"], found["level"]) == ("seen", "supervisor", "info")
    else:
        assert last.endswith(" INFO server: seen")
