"""Requests of equal prompts, or of prompts with an equal beginning, that run together: computed once, held once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core.schedulers.policy import RequestView
from engine.core.schedulers.scheduler import Scheduler

from .scheduling import BLOCK_SIZE, commit, finish, make_scheduler, plan, policy, request, turn, work


def add_equal(scheduler: Scheduler, names: str, prompt: int | Sequence[int], **fields: Any) -> None:
    """Add a request of each name, all with the same prompt."""
    tokens = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
    for name in names:
        scheduler.add(request(name, tokens, **fields))


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("prompt", [14, 15, 16])
def test_equal_prompts_are_computed_and_held_once_from_the_first(count: int, prompt: int) -> None:
    scheduler = make_scheduler(num_blocks=1000, max_batch_tokens=1000, max_running=64)
    for number in range(count):
        scheduler.add(request(f"r{number}", range(100, 100 + prompt), max_tokens=3))
    step = plan(scheduler)
    rest = prompt - 12
    assert work(step) == [(1, 0, prompt, True), *((number, 12, rest, True) for number in range(2, count + 1))]
    assert scheduler.stats().blocks_used == 3 + count, "three full blocks for all, one of its own for each"
    outputs = commit(scheduler, step)
    assert [output.cached_tokens for output in outputs] == [0] + [12] * (count - 1)
    assert scheduler.stats().prompt_tokens == prompt + rest * (count - 1)
    assert scheduler.stats().prefix_hits == 12 * (count - 1)
    finish(scheduler)


def test_equal_prompts_longer_than_a_step_are_computed_once() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    add_equal(scheduler, "abc", 27, max_tokens=9)
    seen = [work(plan(scheduler)) for _ in range(4)]
    assert seen == [
        [(1, 0, 10, False)],
        [(1, 10, 10, False)],
        [(1, 20, 7, True), (2, 24, 3, True)],
        [1, 2, (3, 24, 3, True)],
    ]
    assert scheduler.stats().blocks_used == 6 + 3


def test_prompts_with_an_equal_beginning_share_its_full_blocks() -> None:
    scheduler = make_scheduler()
    for name, tail in (("a", [1] * 5), ("b", [2] * 9), ("c", [])):
        scheduler.add(request(name, [*range(100, 110), *tail], max_tokens=2))
    assert work(plan(scheduler)) == [(1, 0, 15, True), (2, 8, 11, True), (3, 8, 2, True)]


def test_equal_prompts_of_different_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    for name, salt in ("ax", "by", "cx"):
        scheduler.add(request(name, range(100, 110), salt=salt))
    assert work(plan(scheduler)) == [(1, 0, 10, True), (2, 0, 10, True), (3, 8, 2, True)]


def test_equal_prompts_share_nothing_without_prefix_caching() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    add_equal(scheduler, "ab", 10)
    assert work(plan(scheduler)) == [(1, 0, 10, True), (2, 0, 10, True)]


def test_request_for_prompt_logprobs_computes_its_whole_prompt_and_shares_it() -> None:
    scheduler = make_scheduler(max_batch_tokens=20)
    add_equal(scheduler, "ab", 10, prompt_logprobs=0)
    add_equal(scheduler, "c", 10)
    assert work(plan(scheduler)) == [(1, 0, 10, True), (2, 0, 10, True)]
    assert work(plan(scheduler)) == [1, 2, (3, 8, 2, True)]


def holding(**answers: Callable[..., Any]) -> Scheduler:
    """A scheduler in which `a` has computed 8 of 27 tokens, and `b` and `c`, of the same prompt, hold its blocks.

    By default the policy would preempt `a` for any other request, so that a step's tokens go to others first.
    """
    last = {"preempts": lambda candidate, running: next((view for view in running if view.id == "a"), None)}
    scheduler = make_scheduler(policy(**{**last, **answers}), max_batch_tokens=8)
    add_equal(scheduler, "a", 27, max_tokens=4)
    turn(scheduler)
    add_equal(scheduler, "bc", 27, max_tokens=4)
    return scheduler


def test_whichever_request_is_planned_first_computes_the_shared_blocks() -> None:
    scheduler = holding()
    step = plan(scheduler)
    assert work(step) == [(2, 8, 8, False)], "b is admitted, and goes on where a stopped"
    commit(scheduler, step)
    assert work(plan(scheduler)) == [(2, 16, 8, False)]
    assert work(plan(scheduler)) == [(2, 24, 3, True), (3, 24, 3, True), (1, 24, 2, False)]
    assert scheduler.stats().blocks_used == 6 + 3, "still held once"


@pytest.mark.parametrize("in_flight", [False, True])
def test_others_go_on_where_an_aborted_request_stopped(in_flight: bool) -> None:
    scheduler = holding()
    steps = [plan(scheduler)]
    if not in_flight:
        commit(scheduler, steps.pop())
    scheduler.abort("b")
    scheduler.abort("a")
    steps.append(plan(scheduler))
    assert work(steps[-1]) == [(3, 16, 8, False)]
    scheduler.abort("c")
    assert scheduler.stats().blocks_used == 0
    for step in steps:
        assert commit(scheduler, step) == []
    add_equal(scheduler, "d", 27)
    assert work(plan(scheduler)) == [(4, 24, 3, True)], "what was planned stays cached"


def test_blocks_that_no_request_computes_any_more_are_not_cached() -> None:
    scheduler = make_scheduler(max_batch_tokens=6)
    add_equal(scheduler, "a", 27)
    turn(scheduler)
    scheduler.abort("a")
    assert (scheduler.stats().blocks_used, scheduler.stats().blocks_cached) == (0, 1)
    add_equal(scheduler, "b", 27)
    assert work(plan(scheduler)) == [(2, 4, 6, False)]


def test_preempted_request_leaves_its_unfinished_blocks_to_the_request_it_is_preempted_for() -> None:
    scheduler = make_scheduler(
        policy(preempts=lambda candidate, running: running[0]), max_batch_tokens=8, max_running=1
    )
    add_equal(scheduler, "a", 27)
    turn(scheduler)
    add_equal(scheduler, "b", 27)
    step = plan(scheduler)
    assert step.finished == (1,)
    assert work(step) == [(2, 8, 8, False)]


def test_request_is_not_preempted_in_a_step_in_which_another_relies_on_its_chunk() -> None:
    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return next((view for view in running if candidate.id == "c" and view.id == "a"), None)

    scheduler = make_scheduler(policy(preempts=preempts), max_batch_tokens=18, max_running=2)
    add_equal(scheduler, "a", 27)
    turn(scheduler)
    add_equal(scheduler, "b", 27)
    scheduler.add(request("c"))
    assert work(plan(scheduler)) == [(1, 18, 9, True), (2, 24, 3, True)]
    assert work(plan(scheduler)) == [2, (3, 0, 3, True)]


def test_chunks_of_a_step_whose_planning_was_interrupted_are_planned_again() -> None:
    interrupts = [signal.SIGINT]

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        if interrupts and candidate.id == "c":
            signal.raise_signal(interrupts.pop())
        return None

    scheduler = make_scheduler(policy(preempts=preempts), max_running=3)
    scheduler.add(request("x", max_tokens=9))
    turn(scheduler)
    add_equal(scheduler, "abc", 10)
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule(0.0)
    scheduler.check()
    assert work(plan(scheduler)) == [1, (2, 0, 10, True), (3, 8, 2, True)]


def test_equal_prompts_are_held_once_when_there_is_no_room_for_two() -> None:
    scheduler = make_scheduler(num_blocks=12, max_len=48)
    add_equal(scheduler, "abc", 8 * BLOCK_SIZE + 1, max_tokens=2)
    assert len(plan(scheduler).chunks) == 2, "eight blocks for all, one of its own for each, one spare for the first"
