"""Asyncio streams of one engine that fail, are closed or lose their event loop at any moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.core.errors import EngineError, ExecutorError, InvalidRequestError
from engine.core.text.detokenizer import Detokenizer
from engine.testing.checkpoints import make_checkpoint
from tests.core.failing_attention import GREEDY, PROMPTS, FailingAttention, build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


async def collect(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    return [token async for delta in engine.astream(prompt, params) for token in delta.tokens]


async def gather(engine: Engine, count: int) -> list[Any]:
    streams = (collect(engine, PROMPTS[number]) for number in range(count))
    return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)


@pytest.mark.parametrize("error", [RuntimeError("kaputt"), MemoryError("kaputt"), KeyError("kaputt")], ids=repr)
def test_every_stream_raises_what_fails_in_a_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with build(checkpoint) as engine:
        monkeypatch.setattr(FailingAttention, "error", error)
        found = asyncio.run(gather(engine, 3))
        assert len(found) == 3
        assert all(isinstance(one, ExecutorError) and "kaputt" in str(one) for one in found)


def test_every_stream_raises_a_fault_outside_the_engine_and_later_streams_work(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(detokenizer: Detokenizer, output: object) -> Any:
        raise ZeroDivisionError("kaputt")

    with build(checkpoint) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Detokenizer, "feed", broken)
            assert [type(one) for one in asyncio.run(gather(engine, 3))] == [ZeroDivisionError] * 3
        assert [len(tokens) for tokens in asyncio.run(gather(engine, 3))] == [12] * 3
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("call", [1, 11, 12])
def test_closing_a_stream_during_a_step_leaves_the_others_running(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The stream is closed while a thread turns the tokens of a step into text; the 12th token is its last."""
    feed, calls = Detokenizer.feed, 0

    async def run(engine: Engine) -> list[Any]:
        loop = asyncio.get_running_loop()
        stream: Any = engine.astream(PROMPTS[0], GREEDY)
        first: list[Detokenizer] = []

        def closing(detokenizer: Detokenizer, output: Any) -> Any:
            nonlocal calls
            first.append(detokenizer)
            calls += detokenizer is first[0]
            if detokenizer is first[0] and calls == call:
                loop.call_soon_threadsafe(asyncio.ensure_future, close(stream))
                deadline = time.monotonic() + 30
                while not (engine._async and engine._async._pump and engine._async._pump.closed):
                    assert time.monotonic() < deadline, "the stream was not closed"
                    time.sleep(0.001)
            return feed(detokenizer, output)

        async def close(stream: Any) -> None:
            if call == 1:  # nothing was read yet, and a generator that is being read cannot be closed
                reading.cancel()
            else:
                await stream.aclose()

        monkeypatch.setattr(Detokenizer, "feed", closing)
        reading = asyncio.ensure_future(anext(stream))
        other = asyncio.create_task(collect(engine, PROMPTS[1], SamplingParams(temperature=0, max_tokens=30)))
        await asyncio.wait([reading])
        return await asyncio.wait_for(other, 30)

    with build(checkpoint) as engine:
        assert len(asyncio.run(run(engine))) == 30
        assert calls == call
        assert engine.stats().blocks_used == 0


def test_streams_go_on_while_the_shared_threads_of_the_loop_are_busy(checkpoint: Path) -> None:
    async def run(engine: Engine) -> list[int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        over = threading.Event()
        busy = asyncio.create_task(asyncio.to_thread(over.wait))
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(collect(engine, PROMPTS[0]), 30)
        finally:
            over.set()
            await busy

    with build(checkpoint) as engine:
        assert len(asyncio.run(run(engine))) == 12


def test_an_invalid_prompt_fails_its_own_stream(checkpoint: Path) -> None:
    async def run(engine: Engine) -> list[Any]:
        streams = (collect(engine, prompt) for prompt in (PROMPTS[0], [512], PROMPTS[1]))
        return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)

    with build(checkpoint) as engine:
        first, invalid, last = asyncio.run(run(engine))
        assert [len(first), len(last)] == [12, 12]
        assert isinstance(invalid, InvalidRequestError)


def test_cancelled_streams_leave_nothing_behind(checkpoint: Path) -> None:
    async def cut(engine: Engine) -> None:
        tasks = [asyncio.create_task(collect(engine, prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0.05)
        for task in tasks[:3]:
            task.cancel()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert len(found[3]) == 12

    with build(checkpoint) as engine:
        asyncio.run(cut(engine))
        assert engine.stats().running == 0
        assert [len(tokens) for tokens in asyncio.run(gather(engine, 2))] == [12, 12]


# What Python 3.13 says of a loop that is closed without having closed its asynchronous generators.
@pytest.mark.filterwarnings("ignore:coroutine method 'aclose':RuntimeWarning")
def test_an_event_loop_that_ends_early_leaves_the_engine_to_the_next(checkpoint: Path) -> None:
    async def first_delta(engine: Engine) -> None:
        async for _ in engine.astream(PROMPTS[0], GREEDY):
            return

    with build(checkpoint) as engine:
        for _ in range(2):
            asyncio.run(first_delta(engine))
            loop = asyncio.new_event_loop()
            loop.run_until_complete(first_delta(engine))
            loop.close()
        assert [len(tokens) for tokens in asyncio.run(gather(engine, 3))] == [12] * 3


@pytest.mark.filterwarnings("ignore:coroutine method 'aclose':RuntimeWarning")
def test_the_engine_generates_after_streams_whose_event_loop_has_ended(checkpoint: Path) -> None:
    async def first_delta(engine: Engine) -> None:
        async for _ in engine.astream(PROMPTS[0], GREEDY):
            return

    with build(checkpoint) as engine:
        for _ in range(3):
            asyncio.run(collect(engine, PROMPTS[0]))
            assert len(engine.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 12
            asyncio.run(first_delta(engine))
            assert len(list(engine.stream(PROMPTS[0], GREEDY))) == 12
            loop = asyncio.new_event_loop()
            loop.run_until_complete(first_delta(engine))
            loop.close()
            assert len(engine.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 12


def test_closing_the_engine_waits_for_the_step_and_ends_the_streams(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step must not run on what closing has freed."""

    async def run(engine: Engine) -> list[Any]:
        step, begun, held = engine._loop.step, threading.Event(), threading.Event()

        def hold() -> Any:
            begun.set()
            held.wait(30)
            return step()

        monkeypatch.setattr(engine._loop, "step", hold)
        streams = [asyncio.create_task(collect(engine, prompt)) for prompt in PROMPTS[:2]]
        await asyncio.to_thread(begun.wait, 30)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.wait([closing], timeout=0.2)
        assert engine._executor.check().ok
        held.set()
        await closing
        return await asyncio.gather(*streams, return_exceptions=True)

    with build(checkpoint) as engine:
        errors = asyncio.run(run(engine))
    assert {type(error) for error in errors} == {ExecutorError}
    assert {str(error) for error in errors} == {"the engine is closed; make a new one"}


def test_two_event_loops_cannot_share_an_engine(checkpoint: Path) -> None:
    async def outer(engine: Engine) -> None:
        stream: Any = engine.astream(PROMPTS[0], GREEDY)
        await anext(stream)
        with pytest.raises(EngineError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(collect(engine, PROMPTS[1])))
        assert len([delta async for delta in stream]) == 11

    with build(checkpoint) as engine:
        asyncio.run(outer(engine))
