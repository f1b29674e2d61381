"""The executor suite finds the mistakes it is there to find, and passes a correct executor."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from engine.core.errors import EngineError, ExecutorError
from engine.core.executors.base import Executor, Health
from engine.core.executors.control import answer_call, answer_values, decode_call, encode_call
from engine.core.startup import Phases
from engine.core.types import TokenLogprobs
from engine.testing import executors, leftovers
from engine.testing.executors import ExecutorConformance
from engine.testing.ranks import ThreadedRanks


class Threaded(Executor):
    """A thread of its own runs the steps; faulty ones below change one thing."""

    api = "2"

    @classmethod
    def refuses(cls, config: Any, device: Any) -> Any:
        return "it runs one device" if config.executor.tensor_parallel > 1 else None

    def __init__(self, deployment: Any, options: Any) -> None:
        self.deployment = deployment
        self.failure = "it is not started"
        self.listener: Any = None
        self.thread: ThreadPoolExecutor | None = None

    @property
    def asynchronous(self) -> Any:
        return True

    def watch(self, listener: Any) -> None:
        self.listener = listener

    def start(self) -> Any:
        self.thread = ThreadPoolExecutor(1, "threaded")
        try:
            self.runner = self.deployment.make_runner()
            info = self.thread.submit(self.runner.start, Phases(self.listener)).result()
        except BaseException:
            self.shutdown()
            raise
        self.failure = ""
        return info

    def submit(self, step: Any) -> Any:
        if self.thread is None:
            raise ExecutorError("it is shut down")
        return self.thread.submit(self.compute, step)

    def compute(self, step: Any) -> Any:
        try:
            return self.runner.launch(step).result()
        except EngineError:
            raise
        except Exception as error:
            self.failure = f"step {step.id} failed: {error}"
            raise ExecutorError(self.failure) from error

    def check(self) -> Any:
        return Health(ok=not self.failure, detail=self.failure)

    def shutdown(self) -> None:
        self.failure = "it is shut down"
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.shutdown()


class TestThreaded(ExecutorConformance):
    executor = Threaded


class Controlled(Threaded):
    """Has control calls."""

    def call(self, name: Any, arguments: Any) -> Any:
        if self.thread is None:
            raise ExecutorError("it is shut down")
        call = decode_call(encode_call(0, name, arguments))
        return answer_values([self.thread.submit(answer_call, self.runner, call).result()])


class TestControlled(ExecutorConformance):
    executor = Controlled


class Overtaking(Controlled):
    """Runs a call before the steps in flight."""

    def submit(self, step: Any) -> Any:
        if step.id < 4 or self.thread is None:
            return super().submit(step)
        self.held = [*getattr(self, "held", ()), (step, Future[Any]())]
        return self.held[-1][1]

    def call(self, name: Any, arguments: Any) -> Any:
        answers = super().call(name, arguments)
        for step, future in getattr(self, "held", ()):
            future.set_result(super().submit(step).result())
        return answers


class Mute(Controlled):
    """Answers for no rank."""

    def call(self, name: Any, arguments: Any) -> Any:
        return super().call(name, arguments)[1:]


class Credulous(Controlled):
    """Answers to any call."""

    def call(self, name: Any, arguments: Any) -> Any:
        return super().call("describe", {})


class Fragile(Controlled):
    """Is unwell once a call is refused."""

    def call(self, name: Any, arguments: Any) -> Any:
        try:
            return super().call(name, arguments)
        except EngineError as error:
            self.failure = str(error)
            raise


class Reviving(Controlled):
    """Answers after its end."""

    def call(self, name: Any, arguments: Any) -> Any:
        if self.thread is not None:
            return super().call(name, arguments)
        return answer_values([answer_call(self.runner, decode_call(encode_call(0, name, arguments)))])


class Changed(Threaded):
    """Has another result."""

    def compute(self, step: Any) -> Any:
        return self.change(super().compute(step))

    def change(self, result: Any) -> Any:
        return attrs.evolve(result, tokens=tuple(row[::-1] for row in result.tokens))


class Once(Threaded):
    """Repeats nothing."""

    def compute(self, step: Any) -> Any:
        return super().compute(attrs.evolve(step, iterations=1))


class WithoutLogprobs(Changed):
    def change(self, result: Any) -> Any:
        return attrs.evolve(result, logprobs=(), prompt_logprobs=())


class LogprobsOfOthers(Changed):
    def change(self, result: Any) -> Any:
        def moved(entry: TokenLogprobs | None) -> TokenLogprobs | None:
            return None if entry is None else msgspec.structs.replace(entry, logprob=entry.logprob - 1)

        return attrs.evolve(result, logprobs=tuple(tuple(map(moved, row)) for row in result.logprobs))


class WrongNumber(Changed):
    def change(self, result: Any) -> Any:
        return attrs.evolve(result, step=result.step + 1)


class OneAtATime(Threaded):
    """Has room for a single step, whose result it waits for."""

    busy = False

    def submit(self, step: Any) -> Any:
        if self.busy:
            raise ExecutorError(f"step {step.id} has to wait")
        self.busy = True
        return super().submit(step)

    def compute(self, step: Any) -> Any:
        try:
            return super().compute(step)
        finally:
            self.busy = False


class Shifting(Threaded):
    """Gives each step the result of the one that was submitted last, where there are several."""

    def submit(self, step: Any) -> Any:
        executor = self
        executor.last = super().submit(step)  # type: ignore[attr-defined]

        class Last:
            def done(self) -> Any:
                return True

            def result(self) -> Any:
                return executor.last.result()  # type: ignore[attr-defined]

        return Last()


class Unverified(Changed):
    def change(self, result: Any) -> Any:
        return attrs.evolve(result, verified=())


class NeverDone(Threaded):
    def submit(self, step: Any) -> Any:
        pending = super().submit(step)
        pending.done = lambda: False  # type: ignore[method-assign]
        return pending


class Unwell(Threaded):
    def check(self) -> Any:
        return Health(ok=False, detail="it has a cold")


class NoBlocks(Threaded):
    def start(self) -> Any:
        return attrs.evolve(super().start(), num_blocks=0)


class OtherPages(Threaded):
    def start(self) -> Any:
        return attrs.evolve(super().start(), block_size=32)


class OtherType(Threaded):
    def start(self) -> Any:
        return attrs.evolve(super().start(), dtype="bfloat16")


class Backwards(Threaded):
    def start(self) -> Any:
        return attrs.evolve(super().start(), phases=(("weights", -1.0),))


class Chatty(Threaded):
    def start(self) -> Any:
        self.listener("weights")
        return super().start()


class Vague(Threaded):
    @property
    def asynchronous(self) -> Any:
        return None


class Raw(Threaded):
    """Lets errors through as they come."""

    def compute(self, step: Any) -> Any:
        return self.runner.launch(step).result()


class Mumbling(Threaded):
    def compute(self, step: Any) -> Any:
        try:
            return super().compute(step)
        except ExecutorError as error:
            raise ExecutorError("a step failed") from error


class Optimistic(Threaded):
    """Is well until it is shut down."""

    def check(self) -> Any:
        return Health(ok=self.thread is not None, detail="it is shut down")


class Wordless(Threaded):
    def check(self) -> Any:
        return Health(ok=not self.failure)


class Immortal(Threaded):
    """Is well even then."""

    def check(self) -> Any:
        return Health(ok=True)


class ShutOnce(Threaded):
    def shutdown(self) -> None:
        assert self.thread is not None, "there is no thread"
        super().shutdown()


class Reopening(Threaded):
    """Goes on after its end."""

    def submit(self, step: Any) -> Any:
        self.thread = self.thread or ThreadPoolExecutor(1, "threaded")
        return super().submit(step)


class Unready(Threaded):
    """Falls over its own end."""

    def submit(self, step: Any) -> Any:
        assert self.thread is not None, "the thread is gone"
        return super().submit(step)


left: list[Any] = []
"""Of the executors below, to be tidied up."""


@pytest.fixture
def tidy() -> Iterator[None]:
    yield
    while left:
        left.pop()()


def leave_thread() -> None:
    over = threading.Event()
    threading.Thread(target=over.wait, name="forgotten").start()
    left.append(over.set)


def leave_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    left.extend((process.wait, process.kill))


def leave_file() -> None:
    file = open(os.devnull)  # noqa: SIM115
    left.append(file.close)


def leave_memory() -> None:
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.close(descriptor)
    left.append(lambda: os.unlink(name))


def leaving(leave: Any) -> type[Threaded]:
    """An executor that leaves something behind when it is shut down."""

    class Leaving(Threaded):
        def shutdown(self) -> None:
            if self.thread is not None:
                leave()
            super().shutdown()

    return Leaving


class Untidy(Threaded):
    """Leaves its thread where a start fails."""

    def start(self) -> Any:
        self.thread = ThreadPoolExecutor(1, "threaded")
        left.append(self.thread.shutdown)
        self.runner = self.deployment.make_runner()
        info = self.thread.submit(self.runner.start).result()
        self.failure = ""
        return info


class Wrapping(Threaded):
    """Has one error for everything."""

    def start(self) -> Any:
        try:
            return super().start()
        except EngineError as error:
            raise ExecutorError(f"it could not start: {error}") from error


class Eager(Threaded):
    """Starts in its constructor."""

    def __init__(self, deployment: Any, options: Any) -> None:
        super().__init__(deployment, options)
        leave_thread()


class Willing(Threaded):
    @classmethod
    def refuses(cls, config: Any, device: Any) -> Any:
        return None


class Unwilling(Threaded):
    @classmethod
    def refuses(cls, config: Any, device: Any) -> Any:
        return "no"


class Silent(Threaded):
    @classmethod
    def refuses(cls, config: Any, device: Any) -> Any:
        return "" if config.executor.tensor_parallel > 1 else None


FAULTS: list[tuple[type[Executor], str, str]] = [
    (Changed, "test_steps", r"step 2 sampled .*; uniproc"),
    (Changed, "test_generate", "the tokens are not those of uniproc"),
    (Once, "test_steps", r"step 4 sampled .*; uniproc"),
    (WithoutLogprobs, "test_steps", "step 2 has 0 log probabilities, not"),
    (LogprobsOfOthers, "test_steps", "step 2: log probability"),
    (WrongNumber, "test_steps", "the result of step 1 says that it is of 2"),
    (OneAtATime, "test_steps", "step 12 has to wait"),
    (Shifting, "test_steps", "the result of step 11 says that it is of 12"),
    (Unverified, "test_steps", "step 8 verified"),
    (NeverDone, "test_steps", "done.. is false for step 9"),
    (Unwell, "test_start_and_shutdown", "says after the start: it has a cold"),
    (NoBlocks, "test_start_and_shutdown", "there are 0 KV blocks"),
    (OtherPages, "test_start_and_shutdown", "blocks of 32 tokens"),
    (OtherType, "test_start_and_shutdown", "the model is in bfloat16"),
    (Backwards, "test_start_and_shutdown", "phases took"),
    (Chatty, "test_start_and_shutdown", "the listener received"),
    (Vague, "test_start_and_shutdown", "asynchronous is None"),
    (Raw, "test_a_step_that_fails", str(executors.UNKNOWN_SEQUENCE)),
    (Mumbling, "test_a_step_that_fails", "does not say what went wrong: a step failed"),
    (Optimistic, "test_a_step_that_fails", "finds nothing wrong after a step has failed"),
    (Wordless, "test_a_step_that_fails", "does not say what is wrong"),
    (Overtaking, "test_control_calls", "a call overtakes earlier steps on rank 0"),
    (Mute, "test_control_calls", r"does not answer once per rank, in order: \[\]"),
    (Credulous, "test_control_calls", "DID NOT RAISE"),
    (Fragile, "test_control_calls", "reports a call that was refused"),
    (Reviving, "test_control_calls", "DID NOT RAISE"),
    (Immortal, "test_start_and_shutdown", "that is shut down can run steps"),
    (ShutOnce, "test_start_and_shutdown", "there is no thread"),
    (Reopening, "test_start_and_shutdown", "DID NOT RAISE"),
    (Unready, "test_start_and_shutdown", "the thread is gone"),
    (leaving(leave_thread), "test_nothing_is_left_behind", "left behind: thread forgotten"),
    (leaving(leave_process), "test_nothing_is_left_behind", r"left behind: process \d+ python"),
    (leaving(leave_file), "test_nothing_is_left_behind", "left behind: open file /dev/null"),
    (leaving(leave_memory), "test_nothing_is_left_behind", "left behind: /dev/shm has tmp"),
    (Untidy, "test_nothing_is_left_of_a_start_that_fails", "a start that failed left behind: thread threaded"),
    (Wrapping, "test_nothing_is_left_of_a_start_that_fails", "it could not start"),
    (Wrapping, "test_a_checkpoint_without_weights", "it could not start"),
    (Eager, "test_making_one_does_no_work", "a constructor left behind: thread forgotten"),
    (Willing, "test_ranks_are_refused", "answers None to 2 ranks"),
    (Unwilling, "test_ranks_are_refused", "refuses 1 ranks"),
    (Silent, "test_ranks_are_refused", "with an empty string"),
]


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize(
    ("executor", "test", "message"), FAULTS, ids=[f"{fault[0].__name__}-{fault[1]}" for fault in FAULTS]
)
def test_a_fault_is_found(
    executor: type[Executor],
    test: str,
    message: str,
    engine_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (executors, leftovers):
        monkeypatch.setattr(module, "PATIENCE", 0.3)
    suite = type("Suite", (ExecutorConformance,), {"executor": executor})()
    needs: tuple[Path, ...] = (engine_checkpoint,)
    if test == "test_ranks_are_refused":
        needs = ()
    if test == "test_a_checkpoint_without_weights":
        needs = (engine_checkpoint, tmp_path)
    with pytest.raises((AssertionError, KeyError, ExecutorError, pytest.fail.Exception), match=message):
        getattr(suite, test)(*needs)


def test_an_error_of_several_ranks_says_of_which(engine_checkpoint: Path) -> None:
    class Two(ThreadedRanks):
        ranks = 2
        failure = ""

        def submit(self, step: Any) -> Any:
            try:
                return super().submit(step)
            except KeyError as error:
                self.failure = self.words.format(error)  # type: ignore[attr-defined]
                raise ExecutorError(self.failure) from error

        def check(self) -> Any:
            return Health(ok=not self.failure, detail=self.failure)

    members = {"ranks": 2, "executor": type("Nameless", (Two,), {"words": "it failed: {}"})}
    with pytest.raises(AssertionError, match="does not say on which rank: it failed: 424242"):
        type("Suite", (ExecutorConformance,), members)().test_a_step_that_fails(engine_checkpoint)
    members["executor"] = type("Named", (Two,), {"words": "rank 0 failed: {}"})
    type("Suite", (ExecutorConformance,), members)().test_a_step_that_fails(engine_checkpoint)


def test_what_a_library_leaves_may_be_excused(
    engine_checkpoint: Path, tidy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE", 0.3)
    members = {"executor": leaving(leave_file), "excused": ("^open file /dev/null$",)}
    type("Suite", (ExecutorConformance,), members)().test_nothing_is_left_behind(engine_checkpoint)


def test_one_that_runs_any_number_of_ranks_says_so() -> None:
    suite = type("Suite", (ExecutorConformance,), {"executor": Willing, "refused_ranks": None})()
    with pytest.raises(pytest.skip.Exception, match="runs any number"):
        suite.test_ranks_are_refused()
