"""Which methods of a policy are called, and what happens on invalid answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core.errors import PluginError
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split

from .scheduling import (
    Policy,
    crowded,
    finish,
    make_scheduler,
    plan,
    policy,
    request,
    turn,
    work,
)

# Calls


def test_policy_methods_are_called_only_when_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("the default method was called")

    for method in ("preempts", "split", "decode_steps"):
        monkeypatch.setattr(SchedulingPolicy, method, unexpected)
    scheduler = make_scheduler(max_running=1)
    for name in "ab":
        scheduler.add(request(name, max_tokens=3))
    assert len(finish(scheduler)) == 6


# Invalid answers


class Failing(Policy):
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        raise LookupError("lost my list")


def test_schedule_names_a_failing_policy_with_its_cause_and_stays_consistent() -> None:
    scheduler = make_scheduler(Failing())
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=r"Failing failed in order\(\): LookupError: lost my list") as error:
        scheduler.schedule(0.0)
    assert isinstance(error.value.__cause__, LookupError)
    scheduler.check()
    assert scheduler.abort("a") is not None


def foreign_views() -> list[RequestView]:
    """Views of a request of another scheduler, with an id that is in use in the scheduler under test."""
    other = make_scheduler()
    other.add(request("a"))
    return list(other._queues.waiting_views)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("order", lambda waiting, now: ["a"]),
        ("order", lambda waiting, now: foreign_views()),
        ("order", lambda waiting, now: None),
        ("split", lambda budget, waiting, running: None),
        ("split", lambda budget, waiting, running: Split(decode=1.5, prefill=2)),  # type: ignore[arg-type]
    ],
)
def test_schedule_names_policy_and_method_on_an_invalid_answer(method: str, answer: Callable[..., Any]) -> None:
    scheduler = make_scheduler(policy(**{method: answer}))
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=rf"Changed .*{method}\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_step_finished_leaves_out_sequences_the_runner_never_saw() -> None:
    answers = [lambda waiting: [waiting[0], None], lambda waiting: waiting]
    scheduler = make_scheduler(policy(order=lambda waiting, now: answers.pop(0)(waiting)))
    for name in "ab":
        scheduler.add(request(name))
    with pytest.raises(PluginError):
        scheduler.schedule(0.0)
    scheduler.abort("a")
    step = plan(scheduler)
    assert step.finished == ()
    assert [new.sequence for new in step.new] == [2]


@pytest.mark.parametrize("answer", [None, "b"])
def test_victim_raises_on_an_invalid_answer(answer: object) -> None:
    scheduler = crowded(policy(victim=lambda running: answer))
    with pytest.raises(PluginError, match=r"Changed returned .* from victim\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_decode_steps_raises_on_an_invalid_answer_and_loses_nothing() -> None:
    answers = iter([None, 1])
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: next(answers)))
    scheduler.add(request("a", 4))
    turn(scheduler)
    with pytest.raises(PluginError, match=r"decode_steps\(\)"):
        scheduler.schedule(0.0)
    step = plan(scheduler)
    assert work(step) == [1]
    assert [sequence for sequence, _ in step.blocks] == [1]


def test_preempts_raises_on_an_invalid_answer() -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: candidate), max_running=1)
    scheduler.add(request("a"))
    turn(scheduler)
    scheduler.add(request("b"))
    with pytest.raises(PluginError, match=r"preempts\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_order_may_leave_a_request_waiting_unless_nothing_else_runs() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [view for view in waiting if view.id != "a"]))
    scheduler.add(request("a", max_tokens=1))
    scheduler.add(request("b", max_tokens=2))
    assert [output.request for output in finish(scheduler)] == ["b", "b", "a"]


def test_order_admits_a_request_named_twice_only_once() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [*waiting, *waiting]))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert [chunk.sequence for chunk in plan(scheduler).chunks] == [1, 2]


def test_split_of_nothing_still_makes_progress() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=0, prefill=-1)))
    for name in "ab":
        scheduler.add(request(name, max_tokens=2))
    assert len(finish(scheduler)) == 4


def test_views_include_planned_steps_and_are_read_only() -> None:
    seen: list[RequestView] = []

    def order(waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        seen.extend(waiting)
        return waiting

    scheduler = make_scheduler(policy(order=order))
    scheduler.add(request("a", 5, priority=3, arrival=2.5))
    plan(scheduler)
    (view,) = seen
    assert (view.id, view.priority, view.arrival, view.prompt_tokens) == ("a", 3, 2.5, 5)
    assert (view.computed_tokens, view.output_tokens, view.preemptions) == (5, 1, 0)
    with pytest.raises(AttributeError):
        view.priority = 0  # type: ignore[misc]
    for number in range(1, 4):
        plan(scheduler)
        assert (view.computed_tokens, view.output_tokens) == (5 + number, 1 + number)
    scheduler._queues.preempt(scheduler._queues.running[1])
    assert (view.computed_tokens, view.output_tokens, view.preemptions) == (0, 4, 1)


def test_order_gets_the_waiting_requests_in_order_of_arrival() -> None:
    seen: list[list[str]] = []
    scheduler = make_scheduler(
        policy(order=lambda waiting, now: seen.append([view.id for view in waiting]) or waiting), max_running=1
    )
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("d", 2.0)):
        scheduler.add(request(name, arrival=arrival))
    plan(scheduler)
    assert seen == [["b", "d", "a", "c"]]
