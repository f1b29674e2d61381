"""The order in which the loop of steps plans, submits and commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.errors import ExecutorError, StepFaultError
from engine.core.step_loop import StepLoop
from engine.core.types import Output, Step, StepResult


class Events:
    """A scheduler, an executor and grammars of nothing but a list of calls."""

    def __init__(self, *, speculates: bool = True) -> None:
        self.calls: list[str] = []
        self.speculates = speculates
        self.wanted = False
        self.count = 0
        self.interrupt = False
        self.error: Exception | None = None
        self.result: object = None
        self.refusal: Exception | None = None

    def needs_result(self) -> bool:
        return self.wanted

    def schedule(self, now: float) -> Step:
        if self.interrupt:
            raise KeyboardInterrupt
        self.count += 1
        self.calls.append(f"plan {self.count}")
        return Step(id=self.count, decodes=(1,), chunks=())

    def submit(self, step: Step) -> Any:
        self.calls.append(f"submit {step.id}")
        return Pending(self, step.id)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        self.calls.append(f"commit {step.id}")
        if self.refusal is not None:
            raise self.refusal
        return [Output(request=str(step.id))]

    def take_begun(self) -> tuple[()]:
        return ()


class Pending:
    def __init__(self, events: Events, step: int) -> None:
        self.events, self.step = events, step

    def result(self) -> Any:
        if self.events.error is not None:
            raise self.events.error
        if self.events.result is not None:
            return self.events.result
        return StepResult(step=self.step, tokens=((7,),))


def make(events: Any, steps_ahead: int = 1) -> StepLoop:
    return StepLoop(events, events, steps_ahead=steps_ahead, owner="executor", grammars=events, meter=None)


def calls(events: Events, turn: Callable[[], object]) -> list[str]:
    """The calls of one turn."""
    del events.calls[:]
    turn()
    return events.calls


def test_steps_overlap_while_no_result_is_needed() -> None:
    events = Events()
    loop = make(events)
    assert calls(events, loop.step) == ["plan 1", "submit 1"]
    assert calls(events, loop.step) == ["plan 2", "submit 2", "commit 1"]
    assert calls(events, loop.step) == ["plan 3", "submit 3", "commit 2"]


def test_step_in_flight_is_committed_before_the_next_is_planned_when_its_result_is_needed() -> None:
    events = Events()
    loop = make(events)
    loop.step()
    events.wanted = True
    assert calls(events, loop.step) == ["commit 1", "plan 2", "submit 2"]
    assert [output.request for output in loop.step()] == ["2"]
    events.wanted = False
    assert calls(events, loop.step) == ["plan 4", "submit 4", "commit 3"]


def test_nothing_is_asked_without_a_speculator() -> None:
    events = Events(speculates=False)
    events.wanted = True
    loop = make(events)
    loop.step()
    assert calls(events, loop.step) == ["plan 2", "submit 2", "commit 1"]


def test_steps_are_committed_in_the_turn_that_submits_them_without_overlap() -> None:
    events = Events()
    events.wanted = True
    loop = make(events, steps_ahead=0)
    assert calls(events, loop.step) == ["plan 1", "submit 1", "commit 1"]
    assert not loop.has_steps


def test_outputs_committed_before_an_interrupt_are_returned_later() -> None:
    events = Events()
    loop = make(events)
    loop.step()
    events.wanted = events.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    assert not loop.failure
    assert loop.has_steps
    events.interrupt = False
    assert [output.request for output in loop.step()] == ["1"]


def test_failed_step_leaves_a_reason() -> None:
    events = Events()
    loop = make(events)
    loop.step()
    events.wanted, events.error = True, ExecutorError("the device is gone")
    with pytest.raises(ExecutorError, match="the device is gone"):
        loop.step()
    assert loop.failure == "the device is gone"


@pytest.mark.parametrize(
    ("result", "refusal", "wrong"),
    [
        (StepResult, None, "<class '.*StepResult'>, not a StepResult"),
        (7, None, "7, not a StepResult"),
        (None, ExecutorError("the result of step 1 came out of order"), "the result of step 1 came out of order"),
    ],
)
def test_executor_is_named_when_its_result_is_wrong(result: object, refusal: Exception | None, wrong: str) -> None:
    events = Events()
    events.result, events.refusal = result, refusal
    loop = make(events, steps_ahead=0)
    with pytest.raises(StepFaultError, match=rf"^executor returned a wrong result from result\(\): {wrong}$") as caught:
        loop.step()
    assert loop.failure == str(caught.value)


def test_error_of_a_commit_stays_as_it_is_when_the_result_is_right() -> None:
    events = Events()
    events.refusal = KeyError("tide")
    loop = make(events, steps_ahead=0)
    with pytest.raises(KeyError, match="tide"):
        loop.step()
    assert loop.failure == "KeyError: 'tide'"
