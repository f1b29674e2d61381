"""Which methods of a policy are called, and who decides where a policy fails."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest

from engine.core.errors import PluginError
from engine.core.plugin_host.guard import guarded
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split

from .scheduling import (
    Policy,
    finish,
    make_scheduler,
    plan,
    policy,
    request,
    turn,
    views,
)

# Calls


def test_policy_methods_are_called_only_when_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("the default method was called")

    for method in ("preempts", "split", "prefill_limit", "decode_steps"):
        monkeypatch.setattr(SchedulingPolicy, method, unexpected)
    scheduler = make_scheduler(max_running=1)
    for name in "ab":
        scheduler.add(request(name, max_tokens=3))
    assert len(finish(scheduler)) == 6


# Faults


class Failing(Policy):
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        raise LookupError("lost my list")


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages logged about policies."""
    return [record.getMessage() for record in caplog.records if record.name.endswith("checked_policy")]


def test_a_policy_that_raises_is_logged_once_with_its_traceback_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(Failing())
    for name in "ab":
        scheduler.add(request(name, max_tokens=2))
    scheduler.add(request("c", max_tokens=2))
    assert [output.request for output in finish(scheduler) if output.finish_reason] == ["a", "b", "c"]
    scheduler.add(request("d", max_tokens=2))
    finish(scheduler)
    assert scheduler.stats().policy_faults == 2
    [message] = faults(caplog)
    assert message.startswith("scheduler 'Failing' passed in from Python failed in order(): LookupError: lost my list;")
    assert "lost my list" in str(caplog.records[0].exc_info)


def test_a_policy_whose_error_has_no_readable_text_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    class Unreadable(Failing):
        def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
            raise UnreadableError

    scheduler = make_scheduler(Unreadable())
    scheduler.add(request("a", max_tokens=1))
    assert [output.request for output in finish(scheduler) if output.finish_reason] == ["a"]
    assert "order(): UnreadableError: an exception whose str() raises ValueError;" in faults(caplog)[0]


def test_a_policy_is_named_by_its_registered_name_and_distribution(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(guarded(Failing, "scheduler 'lost' of engine-lost 0.4", ())())
    scheduler.add(request("a", max_tokens=1))
    finish(scheduler)
    assert faults(caplog)[0].startswith("scheduler 'lost' of engine-lost 0.4 failed in order()")


def foreign_views() -> list[RequestView]:
    """Views of a request of another scheduler, with an id that is in use in the scheduler under test."""
    other = make_scheduler()
    other.add(request("a"))
    return list(other._queues.waiting_views)


class Hostile:
    """An answer that raises when it is shown."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look")


class Odd(BaseException):
    """Outside Exception."""


def raising(error: BaseException) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        raise error

    return answer


WRONG: list[tuple[str, Callable[..., Any]]] = [
    ("order", lambda waiting, now: ["a"]),
    ("order", lambda waiting, now: foreign_views()),
    ("order", lambda waiting, now: None),
    ("order", lambda waiting, now: 7),
    ("order", lambda waiting, now: [Hostile()]),
    ("order", lambda waiting, now: cycle(waiting)),
    ("order", lambda waiting, now: [waiting[0]] * 2),
    ("split", lambda budget, waiting, running: None),
    ("split", lambda budget, waiting, running: Split(decode=1.5, prefill=2)),  # type: ignore[arg-type]
    ("victim", lambda running: None),
    ("victim", lambda running: "b"),
    ("victim", lambda running: foreign_views()[0]),
    ("preempts", lambda candidate, running: candidate),
    ("preempts", lambda candidate, running: True),
    ("decode_steps", lambda running, waiting: None),
    ("decode_steps", lambda running, waiting: 2.0),
    *(
        (method, raising(error))
        for method in ("order", "split", "victim", "preempts", "decode_steps")
        for error in (KeyError("tide"), SystemExit(3), Odd("tide"), PluginError("on purpose"), MemoryError("no room"))
    ),
]


@pytest.mark.parametrize(("method", "answer"), WRONG)
def test_every_request_finishes_first_come_first_served_when_a_policy_fails(
    method: str, answer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def run(chosen: Policy | None) -> list[tuple[str, tuple[int, ...]]]:
        scheduler = make_scheduler(chosen, num_blocks=5, max_len=20, max_running=2)
        for name in "abc":
            scheduler.add(request(name, 7, max_tokens=10))
        done = [(output.request, output.tokens) for output in finish(scheduler)]
        assert bool(scheduler.stats().policy_faults) == (chosen is not None)
        assert scheduler.stats().blocks_used == 0
        return done

    assert run(policy(**{method: answer})) == run(None)
    [message] = faults(caplog)
    assert message.startswith("scheduler 'Changed' passed in from Python ")
    assert f" {method}(): " in message


def test_a_policy_decides_again_as_soon_as_it_answers_well(caplog: pytest.LogCaptureFixture) -> None:
    answers = [lambda waiting: None, lambda waiting: waiting[::-1]]
    scheduler = make_scheduler(policy(order=lambda waiting, now: answers.pop(0)(waiting)), max_running=1)
    scheduler.add(request("a", max_tokens=1))
    turn(scheduler)
    for name in "bc":
        scheduler.add(request(name, max_tokens=1))
    assert [output.request for output in turn(scheduler)] == ["c"]
    assert scheduler.stats().policy_faults == 1
    assert len(faults(caplog)) == 1


def test_valid_answers_before_an_invalid_one_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [waiting[2], None, waiting[1]]))
    for name in "abc":
        scheduler.add(request(name, max_tokens=1))
    plan(scheduler)
    assert [view.id for view in views(scheduler)] == ["c", "a", "b"]
    assert "None is not one of the waiting requests" in faults(caplog)[0]


def test_ctrl_c_while_a_policy_runs_is_not_its_fault() -> None:
    def interrupted(waiting: Any, now: float) -> Any:
        signal.raise_signal(signal.SIGINT)
        return waiting

    scheduler = make_scheduler(policy(order=interrupted))
    scheduler.add(request("a"))
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule(0.0)
    assert scheduler.stats().policy_faults == 0


def test_order_may_leave_a_request_waiting_unless_nothing_else_runs() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [view for view in waiting if view.id != "a"]))
    scheduler.add(request("a", max_tokens=1))
    scheduler.add(request("b", max_tokens=2))
    assert [output.request for output in finish(scheduler)] == ["b", "b", "a"]


def test_order_admits_a_request_only_once_when_it_is_named_twice(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [waiting[1], waiting[1], waiting[2]]))
    for name in "abc":
        scheduler.add(request(name))
    plan(scheduler)
    assert [view.id for view in views(scheduler)] == ["b", "a", "c"]
    assert scheduler.stats().policy_faults == 1
    assert "<request 'b'> is not one of the waiting requests that it was given, each named once" in faults(caplog)[0]


def test_order_is_first_come_first_served_when_its_answer_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: cycle(waiting[::-1])))
    for name in "ab":
        scheduler.add(request(name))
    plan(scheduler)
    assert [view.id for view in views(scheduler)] == ["a", "b"]
    assert scheduler.stats().policy_faults == 1
    assert "is not an order of at most the 2 waiting requests" in faults(caplog)[0]


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


def test_views_name_the_tenant_of_a_request_that_has_one() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: seen.extend(waiting) or waiting))
    seen: list[RequestView] = []
    for name, salt in (("a", "blue"), ("b", "")):
        scheduler.add(request(name, 5, salt=salt))
    plan(scheduler)
    assert [(view.id, view.tenant) for view in seen] == [("a", "blue"), ("b", None)]


def test_order_gets_the_waiting_requests_in_order_of_arrival() -> None:
    seen: list[list[str]] = []
    scheduler = make_scheduler(
        policy(order=lambda waiting, now: seen.append([view.id for view in waiting]) or waiting), max_running=1
    )
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("d", 2.0)):
        scheduler.add(request(name, arrival=arrival))
    plan(scheduler)
    assert seen == [["b", "d", "a", "c"]]
