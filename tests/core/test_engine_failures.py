"""Engines whose steps fail as a whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, Request, SamplingParams
from engine.core.errors import ExecutorError
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.testing.checkpoints import make_checkpoint
from tests.core.failing_attention import GREEDY, PROMPTS, FailingAttention, build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def late_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps fail where their results are waited for, as on a GPU."""

    class Pending:
        def done(self) -> bool:
            return True

        def result(self) -> Any:
            raise ExecutorError("the device is gone")

    monkeypatch.setattr(UniprocExecutor, "submit", lambda executor, step: Pending())


def early_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingAttention, "error", RuntimeError("the device is gone"))


@pytest.mark.parametrize("fail", [early_failure, late_failure])
def test_later_calls_say_why_a_step_failed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with build(checkpoint) as engine:
        assert len(engine.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 12
        with monkeypatch.context() as patch:
            fail(patch)
            with pytest.raises(ExecutorError, match="the device is gone"):
                engine.generate(PROMPTS, GREEDY)
        health = engine.check()
        assert not health.ok
        assert "the device is gone" in health.detail
        calls: list[Callable[[], object]] = [
            engine.step,
            lambda: engine.add(Request(id="a", prompt=(1, 2), params=GREEDY)),
            lambda: engine.generate(PROMPTS, GREEDY),
            lambda: list(engine.stream(PROMPTS[0], GREEDY)),
            lambda: asyncio.run(collect(engine, PROMPTS[0])),
        ]
        for call in calls:
            with pytest.raises(ExecutorError, match=r"can only be closed.*the device is gone"):
                call()
        assert engine.abort("a") is None
    assert engine.check().detail == "the engine is closed"
    with pytest.raises(ExecutorError, match="the engine is closed"):
        engine.add(Request(id="a", prompt=(1, 2), params=GREEDY))


async def collect(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    return [token async for delta in engine.astream(prompt, params) for token in delta.tokens]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_engine_survives_a_ctrl_c_amid_a_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    forward, calls = FailingAttention.forward, 0

    def interrupted(attention: FailingAttention, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            signal.raise_signal(signal.SIGINT)
        return forward(attention, *arguments)

    with build(checkpoint, scheduler__overlap=overlap) as engine:
        (expected,) = engine.generate([PROMPTS[1]], GREEDY)
        monkeypatch.setattr(FailingAttention, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.stream(PROMPTS[0], GREEDY))
        assert calls > 5, "the step was not finished"
        assert engine.check().ok
        assert engine.stats().blocks_used == 0
        assert engine.generate([PROMPTS[1]], GREEDY)[0].token_ids == expected.token_ids
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["abort", "commit"])
def test_the_engine_survives_a_ctrl_c_while_a_closed_stream_is_aborted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with build(checkpoint, scheduler__overlap="on") as engine:
        stream: Any = engine.stream(PROMPTS[0], GREEDY)
        next(stream)
        method = getattr(engine._scheduler, moment)

        def interrupted(*arguments: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return method(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.close()
        assert engine.check().ok
        assert not engine.has_work
        assert engine.stats().blocks_used == 0
        assert len(engine.generate([PROMPTS[1]], GREEDY)[0].token_ids) == 12
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_raised_amid_a_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(attention: FailingAttention, *arguments: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second Ctrl-C was lost")

    with build(checkpoint) as engine:
        monkeypatch.setattr(FailingAttention, "forward", hanging)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPTS[0]], GREEDY)
        assert "KeyboardInterrupt" in engine.check().detail
