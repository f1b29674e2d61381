"""A worker without a model: what a step samples is its own number. Run as a module, with this directory on the path.

How it behaves is in model.options of its configuration, by rank: {"1": {"at": when, "do": what}}, where `when` is
start, the name of a control call, or the number of a step, or minus that number, for its result, and `what` one of
FAULTS; {"mark": file}, made right before such a fault; {"delay": seconds a step takes}, one after the other as on a
device; and {"hold": directory}: a step ends when its number is a file there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import CapacityError, ControlError, ExecutorError
from engine.core.startup import Phases
from engine.core.types import CacheInfo, Step, StepResult
from engine.plugins.executors import worker
from engine.plugins.executors.control_messages import Assignment, Launch


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    signal.raise_signal(signal.SIGSTOP)  # to this thread: after os.kill it may go on until another has stopped all


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def leave() -> None:
    os._exit(3)


def capacity() -> None:
    raise CapacityError("the model does not fit; use a smaller one")


def unexpected() -> None:
    raise ValueError("this was not expected")


def out_of_memory() -> None:
    raise OutOfMemoryError("no memory left")


FAULTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (kill, stop, sleep_for_ever, leave, capacity, unexpected, out_of_memory)
}


ERRORS: dict[str, type[Exception]] = {"control": ControlError, "device": ExecutorError, "unexpected": ValueError}


class Pending:
    def __init__(self, step: int, at: float, gate: Path | None, fault: Callable[[int], None]) -> None:
        self._step = step
        self._at = at
        self._gate = gate
        self._fault = fault

    def done(self) -> bool:
        return time.monotonic() >= self._at and (self._gate is None or self._gate.exists())

    def result(self) -> StepResult:
        self._fault(-self._step)
        time.sleep(max(0.0, self._at - time.monotonic()))
        while not self.done():
            time.sleep(0.005)
        return StepResult(step=self._step, tokens=((self._step,),))


class FakeRunner:
    def __init__(self, assignment: Assignment, phases: Phases) -> None:
        self._rank = assignment.rendezvous.rank
        self._options: dict[str, Any] = dict(assignment.config.model.options)
        self._busy_until = 0.0

    def start(self, phases: Phases) -> CacheInfo:
        with phases.phase("weights"):
            phases.progress(1, 2)
            self._fault("start")
        return CacheInfo(
            num_blocks=100 - self._rank,
            block_size=16,
            weights_bytes=1,
            activation_bytes=1,
            kv_bytes=1,
            budget_bytes=3,
            device=f"rank {self._rank}",
            dtype="float32",
            phases=phases.seconds,
        )

    def launch(self, step: Step) -> Pending:
        self._fault(step.id)
        self._busy_until = max(self._busy_until, time.monotonic()) + self._options.get("delay", 0.0)
        gate = Path(self._options["hold"]) / str(step.id) if "hold" in self._options else None
        return Pending(step.id, self._busy_until, gate, self._fault)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """`where`: the rank. `fail`: raise the error named by `error`, on the rank `rank` alone."""
        self._fault(name)
        if name == "fail" and arguments.get("rank") == self._rank:
            raise ERRORS[arguments["error"]]("it went wrong")
        return {"rank": self._rank, **arguments}

    def _fault(self, when: str | int) -> None:
        mine = self._options.get(str(self._rank), {})
        if mine.get("at") == when:
            if "mark" in self._options:
                Path(self._options["mark"]).touch()
            FAULTS[mine["do"]]()


def make_runner(launch: Launch, phases: Phases) -> FakeRunner:
    assert os.path.getsize(launch.rendezvous.place) == 0
    return FakeRunner(launch, phases)


if __name__ == "__main__":
    sys.exit(worker.run(make_runner))
