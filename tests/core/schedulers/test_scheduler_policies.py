"""What policies are asked, and what becomes of wrong answers."""

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

# What policies are asked


def test_a_policy_is_asked_only_what_it_has_an_answer_of_its_own_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("asked")

    for question in ("preempts", "split", "decode_steps"):
        monkeypatch.setattr(SchedulingPolicy, question, unexpected)
    scheduler = make_scheduler(max_running=1)
    for name in "ab":
        scheduler.add(request(name, max_tokens=3))
    assert len(finish(scheduler)) == 6


# Wrong policies


class Failing(Policy):
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        raise LookupError("lost my list")


def test_a_failing_policy_is_named_with_its_cause_and_leaves_nothing_half_done() -> None:
    scheduler = make_scheduler(Failing())
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=r"Failing failed in order\(\): LookupError: lost my list") as error:
        scheduler.schedule(0.0)
    assert isinstance(error.value.__cause__, LookupError)
    scheduler.check()
    assert scheduler.abort("a") is not None


def foreign_views() -> list[RequestView]:
    """Of a request of another scheduler, of a name that is known here."""
    other = make_scheduler()
    other.add(request("a"))
    return list(other._queues.waiting_views)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("order", lambda waiting, now: ["a"]),
        ("order", lambda waiting, now: foreign_views()),
        ("order", lambda waiting, now: None),
        ("split", lambda budget, waiting, running: None),
        ("split", lambda budget, waiting, running: Split(decode=1.5, prefill=2)),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_answer_names_policy_and_question(question: str, answer: Callable[..., Any]) -> None:
    scheduler = make_scheduler(policy(**{question: answer}))
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=rf"Changed .*{question}\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_the_runner_is_not_told_of_the_end_of_what_it_never_saw() -> None:
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
def test_an_impossible_victim(answer: object) -> None:
    scheduler = crowded(policy(victim=lambda running: answer))
    with pytest.raises(PluginError, match=r"Changed answered .* to victim\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_an_impossible_number_of_steps_is_refused_and_nothing_is_lost() -> None:
    answers = iter([None, 1])
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: next(answers)))
    scheduler.add(request("a", 4))
    turn(scheduler)
    with pytest.raises(PluginError, match=r"decode_steps\(\)"):
        scheduler.schedule(0.0)
    step = plan(scheduler)
    assert work(step) == [1]
    assert [sequence for sequence, _ in step.blocks] == [1]


def test_an_impossible_displacement() -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: candidate), max_running=1)
    scheduler.add(request("a"))
    turn(scheduler)
    scheduler.add(request("b"))
    with pytest.raises(PluginError, match=r"preempts\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_who_is_left_out_waits_unless_nothing_else_runs() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [view for view in waiting if view.id != "a"]))
    scheduler.add(request("a", max_tokens=1))
    scheduler.add(request("b", max_tokens=2))
    assert [output.request for output in finish(scheduler)] == ["b", "b", "a"]


def test_one_named_twice_is_admitted_once() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [*waiting, *waiting]))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert [piece.sequence for piece in plan(scheduler).chunks] == [1, 2]


def test_no_share_for_anybody_still_gives_progress() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=0, prefill=-1)))
    for name in "ab":
        scheduler.add(request(name, max_tokens=2))
    assert len(finish(scheduler)) == 4


def test_views_show_what_is_planned_and_cannot_be_changed() -> None:
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


def test_the_waiting_are_shown_in_order_of_arrival() -> None:
    seen: list[list[str]] = []
    scheduler = make_scheduler(
        policy(order=lambda waiting, now: seen.append([view.id for view in waiting]) or waiting), max_running=1
    )
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("d", 2.0)):
        scheduler.add(request(name, arrival=arrival))
    plan(scheduler)
    assert seen == [["b", "d", "a", "c"]]
