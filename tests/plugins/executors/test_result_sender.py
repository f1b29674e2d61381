"""ResultSender sends results in order, limits in-flight steps, and stops at the first failure."""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs

from engine.core.executors.base import MAX_STEPS_IN_FLIGHT
from engine.core.types import StepResult
from engine.plugins.executors.result_sender import ResultSender


@attrs.define
class Pending:
    """A step that is done once `over` is set."""

    error: Exception | None = None
    over: threading.Event = attrs.field(factory=threading.Event)

    def done(self) -> bool:
        return self.over.is_set()

    def result(self) -> StepResult:
        assert self.over.wait(10)
        if self.error is not None:
            raise self.error
        return StepResult(step=0, tokens=())


def test_results_are_sent_in_order_once_they_are_there() -> None:
    sent: list[int] = []
    sender = ResultSender(lambda step, pending: (pending.result(), sent.append(step))[1], lambda *_: None)
    steps = [Pending(), Pending()]
    for number, pending in enumerate(steps):
        sender.wait_for_room()
        sender.add(number, pending)
    steps[1].over.set()
    time.sleep(0.02)
    assert sent == []
    steps[0].over.set()
    sender.finish()
    assert sent == [0, 1]


def test_room_for_another_step_comes_with_a_sent_result() -> None:
    sender = ResultSender(lambda _, pending: (pending.result(), None)[1], lambda *_: None)
    steps = [Pending() for _ in range(MAX_STEPS_IN_FLIGHT)]
    for number, pending in enumerate(steps):
        sender.wait_for_room()
        sender.add(number, pending)
    waiter = threading.Thread(target=sender.wait_for_room, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    steps[0].over.set()
    waiter.join(10)
    assert not waiter.is_alive()
    steps[1].over.set()
    sender.finish()


def test_a_failure_is_reported_with_its_step_and_ends_the_thread() -> None:
    reported: list[Any] = []
    sent: list[int] = []

    def send(step: int, pending: Any) -> None:
        pending.result()
        sent.append(step)

    sender = ResultSender(send, lambda phase, error: reported.append((phase, str(error))))
    broken, fine = Pending(error=ValueError("no memory")), Pending()
    for number, pending in ((7, broken), (8, fine)):
        sender.wait_for_room()
        pending.over.set()
        sender.add(number, pending)
    sender.finish()
    assert reported == [("step 7", "no memory")]
    assert sent == []
