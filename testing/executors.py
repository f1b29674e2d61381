"""Conformance suite for executors: same tokens as `uniproc`, errors reach the caller, and no leftovers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from engine.core.config import EngineConfig, ExecutorConfig, load_config
from engine.core.device import find_device
from engine.core.engine import Engine
from engine.core.errors import CapacityError, CheckpointError, ControlError, ExecutorError
from engine.core.executors import (
    MAX_CALL_BYTES,
    MAX_STEPS_IN_FLIGHT,
    Deployment,
    Executor,
    PendingResult,
    make_executor,
)
from engine.core.plugin_host import load_plugins, resolve, settle
from engine.core.startup import Progress
from engine.core.types import DraftSlice, NewSequence, PrefillChunk, SamplingParams, Step, StepResult
from engine.core.weights import Checkpoint
from engine.testing.leftovers import PATIENCE, assert_nothing_left, belongings

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=0)
DRAWN = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5, logprobs=2, prompt_logprobs=1)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
UNKNOWN_SEQUENCE = 424242
"""Number of a sequence that no runner knows."""
LOGPROB_TOLERANCE = 1e-4
"""Maximum difference between two logprobs of one token."""


class ExecutorConformance:
    """Derive a class named Test... from this one and set `executor`.

    The tests run a tiny Llama in float32. The class of an executor that runs the model in other processes must be
    importable there.
    """

    executor: ClassVar[type[Executor]]
    ranks: ClassVar[int] = 1
    """Number of ranks in the tests (executor.tensor_parallel)."""
    refused_ranks: ClassVar[int | None] = 2
    """A number of ranks that `refuses` must refuse; None: the executor runs any number."""
    device: ClassVar[str] = "cpu"
    settings: ClassVar[Mapping[str, object]] = {}
    """More settings of the engine, as executor__options={...}."""
    excused: ClassVar[Sequence[str]] = ()
    """Regular expressions of leftovers, as `testing.leftovers` describes them, that a library causes: not errors."""
    used: ClassVar[bool] = False
    """Whether the executor has been used once, which initializes libraries."""

    def test_steps(self, engine_checkpoint: Path) -> None:
        """Prefill chunks, decodes, mixed batches and reused blocks give the same results, also with steps in flight."""
        with self.running(engine_checkpoint, reference()) as uniproc:
            expected = run(uniproc, script(), 1) + run(uniproc, script(10), 1)
        with self.running(engine_checkpoint) as executor:
            found = run(executor, script(), 1) + run(executor, script(10), MAX_STEPS_IN_FLIGHT)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)

    def test_generate(self, engine_checkpoint: Path) -> None:
        """An engine generates the same greedy tokens."""
        tokens = []
        for executor, ranks in ((self.executor, self.ranks), (reference(), 1)):
            settings = {**self._settings(executor, ranks), "scheduler__max_batch_tokens": 40}
            with Engine(str(engine_checkpoint), executor=executor, **settings) as engine:
                tokens.append([done.token_ids for done in engine.generate(PROMPTS, GREEDY)])
                assert engine.check().ok, engine.check().detail
        assert tokens[0] == tokens[1], "the tokens are not those of uniproc"

    def test_a_speculator_on_the_device(self, engine_checkpoint: Path) -> None:
        """With the model itself as draft model, all drafts are accepted, and the greedy tokens are the same."""
        drafts = {
            "speculator": "draft_model",
            "speculator__model": str(engine_checkpoint),
            "speculator__length": "fixed",
        }
        tokens = []
        for executor, ranks, given in ((self.executor, self.ranks, drafts), (reference(), 1, {})):
            settings = {**self._settings(executor, ranks), "scheduler__max_batch_tokens": 40, **given}
            with Engine(str(engine_checkpoint), executor=executor, **settings) as engine:
                tokens.append([done.token_ids for done in engine.generate(PROMPTS, GREEDY)])
                speculation = engine.stats().speculation
            if speculation is not None:
                assert sum(speculation.verified) > 0, "no draft was verified: StepResult.proposals may be lost"
                assert speculation.accepted == speculation.verified, "a draft of the model itself was rejected"
        assert tokens[0] == tokens[1], "the tokens are not those of uniproc"

    def test_start_and_shutdown(self, engine_checkpoint: Path) -> None:
        """start() returns a valid CacheInfo and reports Progress.

        shutdown() works with a step in flight and twice; afterwards no step can run.
        """
        reports: list[Any] = []
        executor = self.make(engine_checkpoint)
        executor.watch(reports.append)
        info = executor.start()
        try:
            health = executor.check()
            assert health.ok, f"check() says after the start: {health.detail}"
            assert info.num_blocks > 0, f"there are {info.num_blocks} KV blocks"
            assert info.block_size == 16, f"blocks of {info.block_size} tokens, not of cache.block_size, 16"
            assert info.dtype == "float32", f"the model is in {info.dtype}, not in model.dtype, float32"
            assert all(seconds >= 0 for _, seconds in info.phases), f"phases took {info.phases}"
            assert all(isinstance(one, Progress) for one in reports), f"the listener received {reports}"
            assert isinstance(executor.asynchronous, bool), f"asynchronous is {executor.asynchronous!r}"
            executor.submit(script()[0])
        finally:
            executor.shutdown()
        executor.shutdown()
        assert not executor.check().ok, "check() says that an executor that is shut down can run steps"
        with pytest.raises(ExecutorError):
            executor.submit(script()[0])

    def test_a_step_that_fails(self, engine_checkpoint: Path) -> None:
        """A failed step raises an ExecutorError with cause and rank, and check() reports it afterwards."""
        with self.running(engine_checkpoint) as executor:
            run(executor, script()[:2], 1)
            with pytest.raises(ExecutorError) as caught:
                executor.submit(Step(id=3, decodes=(UNKNOWN_SEQUENCE,), chunks=())).result()
            message = str(caught.value)
            assert str(UNKNOWN_SEQUENCE) in message, f"the error does not say what went wrong: {message}"
            assert self.ranks == 1 or "rank" in message, f"the error does not say on which rank: {message}"
            deadline = time.monotonic() + PATIENCE
            while executor.check().ok:
                assert time.monotonic() < deadline, "check() finds nothing wrong after a step has failed"
                time.sleep(0.01)
            assert executor.check().detail, "check() does not say what is wrong"

    def test_control_calls(self, engine_checkpoint: Path) -> None:
        """call() runs between the steps submitted before and after, with steps in flight too; every rank answers.

        A call that is unknown, refused or fails on a rank raises ControlError, and steps run afterwards.
        """
        if self.executor.call is Executor.call:
            pytest.skip("has no control calls")
        steps = script()
        with self.running(engine_checkpoint) as executor:
            run(executor, steps[:3], 1)
            in_flight = [executor.submit(step) for step in steps[3:5]]
            answers = executor.call("describe", {})
            assert [answer["rank"] for answer in answers] == list(range(self.ranks)), (
                f"call() does not answer once per rank, in order: {answers}"
            )
            for answer in answers:
                assert answer["sequences"] == [2], f"a call overtakes earlier steps on rank {answer['rank']}: {answer}"
            assert [pending.result().step for pending in in_flight] == [4, 5], "a call loses results of steps"
            self._check_refused_calls(executor)
            run(executor, steps[5:], MAX_STEPS_IN_FLIGHT)
            assert [answer["sequences"] for answer in executor.call("describe", {})] == [[3]] * self.ranks
        with pytest.raises(ExecutorError):
            executor.call("describe", {})

    def _check_refused_calls(self, executor: Executor) -> None:
        for name, arguments, words in (
            ("describr", {}, "'describr'.*did you mean describe"),
            ("describe", {"loudly": True}, "describe.*loudly"),
            ("memory_snapshot", {"directory": object()}, "arguments of memory_snapshot"),
            ("memory_snapshot", {"directory": "x" * MAX_CALL_BYTES}, "arguments of memory_snapshot"),
        ):
            with pytest.raises(ControlError, match=words):
                executor.call(name, arguments)
        with pytest.raises(ControlError) as caught:
            executor.call("memory_snapshot", {"directory": "/proc/none"})
        message = str(caught.value)
        assert self.ranks == 1 or "rank" in message, f"the error does not say on which rank: {message}"
        assert executor.check().ok, "check() reports a call that was refused"

    def test_nothing_is_left_behind(self, engine_checkpoint: Path) -> None:
        """No thread, process, open file or entry of /dev/shm is left, except by the first use of libraries."""
        self._use_once(engine_checkpoint)
        before = belongings()
        self._use(engine_checkpoint)
        assert_nothing_left(before, "an executor that was shut down", self.excused)

    def test_nothing_is_left_of_a_start_that_fails(self, engine_checkpoint: Path) -> None:
        """A start that raises CapacityError leaves nothing, although shutdown() is not called."""
        self._use_once(engine_checkpoint)
        before = belongings()
        with pytest.raises(CapacityError):
            self.make(engine_checkpoint, cache__memory="1KiB").start()
        assert_nothing_left(before, "a start that failed", self.excused)

    def test_a_checkpoint_without_weights(self, engine_checkpoint: Path, tmp_path: Path) -> None:
        """A broken checkpoint raises CheckpointError."""
        for file in engine_checkpoint.glob("*.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(CheckpointError, match="safetensors"):
            self.make(tmp_path).start()

    def test_making_one_does_no_work(self, engine_checkpoint: Path) -> None:
        """The constructor starts nothing."""
        self._use_once(engine_checkpoint)
        before = belongings()
        executor = self.make(engine_checkpoint)
        assert_nothing_left(before, "a constructor")
        del executor

    def test_ranks_are_refused(self) -> None:
        """refuses() accepts `ranks` and refuses `refused_ranks`, which nothing else checks."""
        device = find_device(self.device)
        taken = EngineConfig(executor=ExecutorConfig(device=self.device, tensor_parallel=self.ranks))
        assert self.executor.refuses(taken, device) is None, f"refuses() refuses {self.ranks} ranks"
        if self.refused_ranks is None:
            pytest.skip("runs any number")
        wanted = attrs.evolve(taken, executor=attrs.evolve(taken.executor, tensor_parallel=self.refused_ranks))
        refusal = self.executor.refuses(wanted, device)
        assert isinstance(refusal, str), f"refuses() answers {refusal!r} to {self.refused_ranks} ranks"
        assert refusal, "refuses() answers with an empty string"

    def make(self, model: Path, kind: type[Executor] | None = None, **settings: object) -> Executor:
        """Make an executor, of another class if given; it is not started."""
        executor = kind or self.executor
        given = {**self._settings(executor, self.ranks if kind is None else 1), "model__path": str(model), **settings}
        config = load_config(overrides={key.replace("__", "."): (value, "test") for key, value in given.items()}).config
        device = find_device(config.executor.device)
        config = settle(config, device)
        checkpoint = Checkpoint.open(model, generation_config=config.model.generation_config)
        parts = resolve(config, load_plugins(), device, checkpoint.config, {"executor": executor})
        return make_executor(Deployment(config, parts, checkpoint, device))

    @contextmanager
    def running(self, model: Path, kind: type[Executor] | None = None) -> Iterator[Executor]:
        """Start an executor, and shut it down at the end."""
        executor = self.make(model, kind)
        executor.start()
        try:
            yield executor
        finally:
            executor.shutdown()
        if kind is None:
            type(self).used = True

    def _use(self, model: Path) -> None:
        with self.running(model) as executor:
            run(executor, script()[:2], 1)

    def _use_once(self, model: Path) -> None:
        if not self.used:
            self._use(model)

    def _settings(self, executor: type[Executor], ranks: int) -> dict[str, Any]:
        mine = self.settings if executor is self.executor else {}
        return {
            "cache__memory": "8MiB",
            "executor__device": self.device,
            "executor__threads": 1,
            "executor__tensor_parallel": ranks,
            "model__dtype": "float32",
            "model__max_len": 256,
            **mine,
        }


def reference() -> type[Executor]:
    """Return the executor class whose results are the reference."""
    return load_plugins().executors.get("uniproc").load()


def script(after: int = 0) -> Sequence[Step]:
    """Steps of three sequences: one greedy, one sampled with logprobs, and one that reuses blocks of the first and then
    has drafts.

    after: offset of the numbers of steps and sequences; above 0, the script follows the one with offset `after` - 10.
    """
    one, two, three = (after + number for number in (1, 2, 3))
    prompts = [tuple(PROMPTS[row]) for row in (3, 1, 2)]
    lengths = [len(prompt) for prompt in prompts]
    news = [
        NewSequence(sequence=number, tokens=tokens, prompt_len=len(tokens), params=params)
        for number, tokens, params in zip((one, two, three), prompts, (GREEDY, DRAWN, GREEDY), strict=True)
    ]
    steps: list[dict[str, Any]] = [
        {
            "chunks": (PrefillChunk(one, 0, 30, False),),
            "new": (news[0],),
            "blocks": ((one, (0, 1, 2, 5)),),
            "finished": (three - 10,) if after else (),
        },
        {
            "chunks": (PrefillChunk(one, 30, lengths[0] - 30, True), PrefillChunk(two, 0, lengths[1], True)),
            "new": (news[1],),
            "blocks": ((two, (3, 4)),),
        },
        {"decodes": (one, two)},
        {"decodes": (one, two), "iterations": 3},
        {"decodes": (two,), "finished": (one,)},
        {
            "decodes": (two,),
            "chunks": (PrefillChunk(three, 0, lengths[2], True),),
            "new": (news[2],),
            "blocks": ((three, (5, 0)),),
        },
        {"decodes": (three,), "finished": (two,)},
        {"drafts": (DraftSlice(three, lengths[2] + 1, (5, 9, 3)),), "blocks": ((three, (2,)),)},
        {"decodes": (three,), "positions": ((three, lengths[2] + 2),)},
    ]
    return [Step(id=after + number, **{"decodes": (), "chunks": (), **step}) for number, step in enumerate(steps, 1)]


def run(executor: Executor, steps: Sequence[Step], ahead: int) -> list[StepResult]:
    """Run the steps with at most `ahead` in flight; return their results."""
    results = []
    in_flight: deque[PendingResult] = deque()
    for step in steps:
        if len(in_flight) == ahead:
            results.append(in_flight.popleft().result())
        in_flight.append(executor.submit(step))
    for pending in in_flight:
        results.append(pending.result())
        assert pending.done(), f"done() is false for step {results[-1].step}, although its result is there"
    return results


def assert_same(found: StepResult, expected: StepResult) -> None:
    """Compare tokens, verified drafts, and log probabilities up to rounding."""
    step = f"step {expected.step}"
    assert found.step == expected.step, f"the result of {step} says that it is of {found.step}"
    assert found.tokens == expected.tokens, f"{step} sampled {found.tokens}; uniproc {expected.tokens}"
    assert found.verified == expected.verified, f"{step} verified {found.verified}; uniproc {expected.verified}"
    mine, theirs = (
        [entry for row in one.logprobs for entry in row if entry is not None]
        + [entry for _, entries in one.prompt_logprobs for entry in entries]
        for one in (found, expected)
    )
    assert len(mine) == len(theirs), f"{step} has {len(mine)} log probabilities, not {len(theirs)}"
    for one, other in zip(mine, theirs, strict=True):
        assert one.token == other.token, f"{step} has the log probability of token {one.token}, not of {other.token}"
        assert abs(one.logprob - other.logprob) < LOGPROB_TOLERANCE, (
            f"{step}: log probability {one.logprob}, not {other.logprob}"
        )
