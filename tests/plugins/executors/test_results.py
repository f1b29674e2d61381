"""Steps are answered in order, no more than may be under way, until one fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs

from engine.core.executors.base import MAX_STEPS_IN_FLIGHT
from engine.core.types import StepResult
from engine.plugins.executors.results import Answers


@attrs.define
class Pending:
    """A step that is done when the test says so."""

    error: Exception | None = None
    over: threading.Event = attrs.field(factory=threading.Event)

    def done(self) -> bool:
        return self.over.is_set()

    def result(self) -> StepResult:
        assert self.over.wait(10)
        if self.error is not None:
            raise self.error
        return StepResult(step=0, tokens=())


def test_steps_are_answered_in_order_once_they_are_done() -> None:
    answered: list[int] = []
    answers = Answers(lambda step, pending: (pending.result(), answered.append(step))[1], lambda *_: None)
    steps = [Pending(), Pending()]
    for number, pending in enumerate(steps):
        answers.make_room()
        answers.add(number, pending)
    steps[1].over.set()
    time.sleep(0.02)
    assert answered == []
    steps[0].over.set()
    answers.end()
    assert answered == [0, 1]


def test_room_for_another_comes_with_an_answer() -> None:
    answers = Answers(lambda _, pending: (pending.result(), None)[1], lambda *_: None)
    steps = [Pending() for _ in range(MAX_STEPS_IN_FLIGHT)]
    for number, pending in enumerate(steps):
        answers.make_room()
        answers.add(number, pending)
    waiter = threading.Thread(target=answers.make_room, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    steps[0].over.set()
    waiter.join(10)
    assert not waiter.is_alive()
    steps[1].over.set()
    answers.end()


def test_a_failure_is_told_with_its_step_and_ends_the_thread() -> None:
    told: list[Any] = []
    answered: list[int] = []

    def answer(step: int, pending: Any) -> None:
        pending.result()
        answered.append(step)

    answers = Answers(answer, lambda phase, error: told.append((phase, str(error))))
    broken, fine = Pending(error=ValueError("no memory")), Pending()
    for number, pending in ((7, broken), (8, fine)):
        answers.make_room()
        pending.over.set()
        answers.add(number, pending)
    answers.end()
    assert told == [("step 7", "no memory")]
    assert answered == []
