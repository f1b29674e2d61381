"""What is remembered of a waiting request that does not fit, and how the search for requests to preempt goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core.schedulers import admission
from engine.core.schedulers.policy import RequestView
from engine.core.schedulers.scheduler import Scheduler

from .scheduling import commit, make_scheduler, plan, policy, request, turn, views

Asked = list[list[str]]
"""The running requests shown in each call of `preempts`."""


def count_lookups(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts looked up in the prefix cache from now on."""
    blocks, lookups = scheduler._blocks, list[int]()
    lookup = blocks.lookup

    def counted(tokens: Sequence[int], chain: Any) -> list[int]:
        lookups.append(len(tokens))
        return lookup(tokens, chain)

    monkeypatch.setattr(blocks, "lookup", counted)
    return lookups


def running(scheduler: Scheduler) -> list[str]:
    return [view.id for view in views(scheduler)]


def test_request_that_does_not_fit_is_looked_up_again_only_after_enough_blocks_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=24)
    for name in "abc":
        scheduler.add(request(name, 21, max_tokens=60))  # six blocks each
    turn(scheduler)
    lookups = count_lookups(scheduler, monkeypatch)
    scheduler.add(request("d", 41, max_tokens=5))  # eleven, and one for each of the others
    for _ in range(3):
        turn(scheduler)
    assert lookups == [41]
    scheduler.abort("a")
    for _ in range(3):
        turn(scheduler)
    assert lookups == [41], "eight are missing, but seven are released"
    scheduler.abort("b")
    turn(scheduler)
    assert lookups == [41, 41]
    assert running(scheduler) == ["c", "d"]


def test_request_that_does_not_fit_is_looked_up_again_when_another_has_computed_more_of_its_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=12)
    scheduler.add(request("a", [7] * 7, max_tokens=30))
    turn(scheduler)
    ahead = plan(scheduler)  # fills the second block
    lookups = count_lookups(scheduler, monkeypatch)
    scheduler.add(request("b", [7] * 40, max_tokens=3))
    plan(scheduler)
    assert lookups == [40], "ten blocks, of which one is computed, and one for the other; nine are left"
    commit(scheduler, ahead)
    plan(scheduler)
    assert lookups == [40, 40], "the second is computed, too"
    assert running(scheduler) == ["a", "b"]


def test_request_is_not_looked_up_while_max_running_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: None), max_running=1)
    scheduler.add(request("a", max_tokens=9))
    turn(scheduler)
    scheduler.add(request("b"))
    turn(scheduler)
    lookups = count_lookups(scheduler, monkeypatch)
    for _ in range(3):
        turn(scheduler)
    assert lookups == []


def test_digests_of_a_long_prompt_are_computed_over_several_steps_while_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_DIGESTS_PER_STEP", 4)
    scheduler = make_scheduler(num_blocks=200, max_batch_tokens=200)
    scheduler.add(request("a", 45, max_tokens=50))
    turn(scheduler)
    assert running(scheduler) == ["a"], "no one else is delayed"
    scheduler.add(request("b", 45, max_tokens=50))
    scheduler.add(request("c", 45, max_tokens=50, prompt_logprobs=0))
    [waiting, *_] = scheduler._queues.waiting
    seen = []
    while not seen or "b" not in running(scheduler):
        turn(scheduler)
        seen.append(len(waiting.chain))
    assert seen == [4, 8, 11], "eleven full blocks before the last token"
    assert running(scheduler) == ["a", "b", "c"], "without the cache there is nothing to look up"


def full(asked: Asked) -> Scheduler:
    """A scheduler with 26 of 36 blocks in use: by `a` to `f` of 3 each, and by `x` of 8, which is as urgent as any.

    preempts: the last request less urgent than the candidate; its calls are recorded.
    """

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        asked.append([view.id for view in running])
        return next((view for view in reversed(running) if view.priority > candidate.priority), None)

    scheduler = make_scheduler(policy(preempts=preempts), num_blocks=36, max_batch_tokens=200)
    scheduler.add(request("x", 29, max_tokens=80))
    for name in "abcdef":
        scheduler.add(request(name, 9, priority=1, max_tokens=80))
    turn(scheduler)
    assert scheduler.stats().blocks_used == 26
    asked.clear()
    return scheduler


def test_policy_is_asked_once_per_step_after_it_has_declined() -> None:
    asked: Asked = []
    scheduler = full(asked)
    scheduler.add(request("u", 120, max_tokens=3))
    turn(scheduler)
    assert [len(names) for names in asked] == [7, 6, 5, 4, 3, 2, 1], "it would preempt six, which are not enough"
    asked.clear()
    turn(scheduler)
    turn(scheduler)
    assert asked == [["x"], ["x"]]
    assert scheduler.stats().preemptions == 0
    scheduler.abort("c")
    asked.clear()
    turn(scheduler)
    assert asked == [["x"]], "its blocks are counted already"
    scheduler.abort("x")
    turn(scheduler)
    assert running(scheduler) == ["a", "u"], "without x, four are enough"


def test_policy_may_change_its_mind_about_preempting() -> None:
    patience = iter([None, None])

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return next(patience, running[0])

    scheduler = make_scheduler(policy(preempts=preempts), max_running=1)
    scheduler.add(request("a", max_tokens=9))
    turn(scheduler)
    scheduler.add(request("b", max_tokens=9))
    seen = []
    for _ in range(3):
        turn(scheduler)
        seen += running(scheduler)
    assert seen == ["a", "a", "b"]


def test_search_shows_a_bounded_number_of_requests_per_step_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Asked = []
    scheduler = full(asked)
    monkeypatch.setattr(admission, "MAX_VIEWS_PER_STEP", 12)
    scheduler.add(request("u", 84, max_tokens=3))
    shown = []
    while "u" not in running(scheduler):
        turn(scheduler)
        shown.append([len(names) for names in asked])
        asked.clear()
    assert shown == [[7], [6, 5], [4, 3]], "five are preempted"
    assert running(scheduler) == ["x", "a", "u"]
    assert scheduler.stats().preemptions == 5


@pytest.mark.parametrize("leaves", ["f", "e", "b"])
def test_search_goes_on_when_a_request_leaves_in_the_middle(monkeypatch: pytest.MonkeyPatch, leaves: str) -> None:
    scheduler = full([])
    monkeypatch.setattr(admission, "MAX_VIEWS_PER_STEP", 12)
    scheduler.add(request("u", 84, max_tokens=3))
    turn(scheduler)
    turn(scheduler)  # f, e and d are chosen
    scheduler.abort(leaves)
    while "u" not in running(scheduler):
        turn(scheduler)
    assert scheduler.stats().preemptions == 4, "with the one that left, as many as were needed"


def test_fewer_are_preempted_when_blocks_are_released_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = full([])
    monkeypatch.setattr(admission, "MAX_VIEWS_PER_STEP", 12)
    scheduler.add(request("u", 84, max_tokens=3))
    turn(scheduler)
    turn(scheduler)  # f, e and d are chosen
    scheduler.abort("x")
    plan(scheduler)
    assert running(scheduler) == ["a", "b", "c", "u"], "five were needed before"


def test_request_just_admitted_can_be_preempted_in_the_next_step() -> None:
    answers: list[Callable[..., Any]] = [lambda running: None]

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return answers.pop(0)(running) if answers else running[-1]

    scheduler = make_scheduler(policy(preempts=preempts), max_running=2)
    scheduler.add(request("a", max_tokens=9))
    turn(scheduler)
    for name in "bc":
        scheduler.add(request(name, max_tokens=9))
    turn(scheduler)
    assert running(scheduler) == ["a", "b"]
    turn(scheduler)
    assert running(scheduler) == ["a", "c"]
