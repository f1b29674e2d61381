"""How the prompts of several requests share a step, when one of them would fill it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.schedulers.policy import RequestView, SchedulingPolicy
from engine.plugins.schedulers.fcfs import FirstComeFirstServed
from engine.plugins.schedulers.multi_step import MultiStep
from engine.plugins.schedulers.priority import Priority

from .scheduling import make_scheduler, plan, policy, request, turn, work


@pytest.mark.parametrize("chosen", [FirstComeFirstServed, MultiStep, Priority])
def test_short_prompt_is_computed_next_to_a_long_one(chosen: type[SchedulingPolicy]) -> None:
    scheduler = make_scheduler(chosen(), max_batch_tokens=16)
    scheduler.add(request("a", 100))
    assert work(plan(scheduler)) == [(1, 0, 16, False)], "alone it takes all"
    scheduler.add(request("b", 5))
    assert work(plan(scheduler)) == [(1, 16, 11, False), (2, 0, 5, True)], "and what the other leaves"
    assert work(plan(scheduler)) == [2, (1, 27, 15, False)]


def test_default_leaves_nothing_of_a_step_to_others() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    scheduler.add(request("a", 40))
    scheduler.add(request("b", 5))
    assert [work(plan(scheduler)) for _ in range(3)] == [
        [(1, 0, 16, False)],
        [(1, 16, 16, False)],
        [(1, 32, 8, True), (2, 0, 5, True)],
    ]


def test_two_long_prompts_share_the_steps_and_a_third_their_rest() -> None:
    scheduler = make_scheduler(FirstComeFirstServed(), max_batch_tokens=16)
    for name, length in (("a", 40), ("b", 40), ("c", 3)):
        scheduler.add(request(name, length))
    assert work(plan(scheduler)) == [(1, 0, 9, False), (2, 0, 4, False), (3, 0, 3, True)]


def test_equal_long_prompts_are_computed_together() -> None:
    scheduler = make_scheduler(FirstComeFirstServed(), max_batch_tokens=16)
    for name in "ab":
        scheduler.add(request(name, range(100, 148)))
    assert [work(plan(scheduler)) for _ in range(4)] == [
        [(1, 0, 8, False), (2, 8, 8, False)],
        [(1, 16, 8, False), (2, 24, 8, False)],
        [(1, 32, 8, False), (2, 40, 8, True)],
        [2, (1, 44, 4, True)],
    ]


def test_prompt_that_a_step_can_finish_takes_what_is_left_of_the_step_before() -> None:
    scheduler = make_scheduler(FirstComeFirstServed(), max_batch_tokens=16)
    for name in "abc":
        scheduler.add(request(name, 10))
    assert work(plan(scheduler)) == [(1, 0, 10, True), (2, 0, 6, False)]


def test_urgent_long_prompt_leaves_nothing_to_less_urgent_ones() -> None:
    scheduler = make_scheduler(Priority(), max_batch_tokens=16)
    scheduler.add(request("a", 40, priority=1))
    scheduler.add(request("b", 5, priority=2))
    assert work(plan(scheduler)) == [(1, 0, 16, False)]


def test_policy_is_asked_only_for_a_prompt_longer_than_a_step_while_others_wait() -> None:
    asked: list[tuple[str, int, list[str]]] = []

    def prefill_limit(request: RequestView, room: int, others: Sequence[RequestView]) -> int:
        asked.append((request.id, room, [view.id for view in others]))
        return 10

    scheduler = make_scheduler(policy(prefill_limit=prefill_limit), max_batch_tokens=16)
    scheduler.add(request("a", 40))
    turn(scheduler)
    assert asked == []
    scheduler.add(request("b", 6))
    turn(scheduler)
    assert asked == [("a", 16, ["b"])]
    scheduler.add(request("c", 1))
    turn(scheduler)
    assert asked[1:] == [], "no more is left than a step computes"


@pytest.mark.parametrize(("answer", "counts"), [(-3, [15, 1]), (0, [15, 1]), (5, [11, 5]), (10**9, [16])])
def test_whatever_the_limit_the_step_is_filled(answer: int, counts: list[int]) -> None:
    scheduler = make_scheduler(policy(prefill_limit=lambda request, room, others: answer), max_batch_tokens=16)
    for name in "ab":
        scheduler.add(request(name, 40))
    assert [chunk.count for chunk in plan(scheduler).chunks] == counts
    assert scheduler.stats().policy_faults == 0


def test_invalid_limit_is_a_fault_and_the_request_takes_all() -> None:
    scheduler = make_scheduler(policy(prefill_limit=lambda request, room, others: None), max_batch_tokens=16)
    for name in "ab":
        scheduler.add(request(name, 40))
    assert work(plan(scheduler)) == [(1, 0, 16, False)]
    assert scheduler.stats().policy_faults == 1
