"""Preemption when blocks run out, preemption for waiting requests, and aborts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core.schedulers.admission import MAX_PREEMPTIONS_FOR_WAITING
from engine.core.schedulers.policy import RequestView, Split
from engine.core.schedulers.request_state import RequestState
from engine.core.types import Output

from .scheduling import (
    EOS,
    Policy,
    commit,
    crowded,
    finish,
    hash_tokens,
    make_scheduler,
    plan,
    policy,
    request,
    turn,
    work,
)

# Preemption when blocks run out


def test_preempted_request_is_recomputed_from_all_its_tokens() -> None:
    scheduler = crowded()
    step = plan(scheduler)
    assert work(step) == [1], "the first gets the last block, the second is preempted"
    assert scheduler.stats().preemptions == 1
    commit(scheduler, step)
    while scheduler.stats().running:
        step = plan(scheduler)
        assert not step.new, "nothing fits before the first has finished"
        commit(scheduler, step)
    step = plan(scheduler)
    assert step.finished == (1,)
    (new,) = step.new
    assert (new.sequence, new.tokens, new.prompt_len) == (3, (*hash_tokens("b", 7), 7, 7), 7)
    outputs = [*commit(scheduler, step), *finish(scheduler)]
    assert [output.tokens for output in outputs] == [(7,)] * 8, "two of ten tokens were sampled before the preemption"
    assert outputs[-1].finish_reason == "length"


def test_preempted_request_finds_its_blocks_in_the_cache() -> None:
    scheduler = crowded()
    commit(scheduler, plan(scheduler))
    scheduler.abort("a")
    step = plan(scheduler)
    assert work(step) == [(3, 8, 1, True)]
    assert not step.decodes, "the runner does not know the sequence's last token"


def test_preempted_request_is_removed_from_the_step_being_planned() -> None:
    scheduler = crowded(policy(victim=lambda running: running[0]))
    step = plan(scheduler)
    assert work(step) == [2], "the first was in the plan, and was preempted for the second"
    assert step.finished == (1,)
    assert [sequence for sequence, _ in step.blocks] == [2]


def test_preemption_reactivates_a_deferred_sequence() -> None:
    shares = iter([64, 64, *[1] * 20])
    scheduler = crowded(
        policy(
            split=lambda budget, waiting, running: Split(decode=next(shares), prefill=budget),
            victim=lambda running: running[0],
        )
    )
    seen = [plan(scheduler).decodes for _ in range(5)]
    assert seen == [(1,)] * 4 + [(2,)], "the first took the last block, and was preempted when it needed another"
    assert scheduler.stats().preemptions == 1


def test_no_request_is_admitted_in_a_step_that_preempts_one() -> None:
    scheduler = crowded()
    scheduler.add(request("c", 1, max_tokens=1, arrival=1.0))
    step = plan(scheduler)
    assert work(step) == [1], "c overtook the preempted request"


def test_preempted_request_is_not_admitted_while_its_result_is_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead = plan(scheduler)
    second = plan(scheduler)
    assert work(second) == [1]
    scheduler.abort("a")
    assert scheduler.schedule(0.0) is None, "b has a token in flight"
    assert [(output.request, output.tokens) for output in commit(scheduler, ahead, 5, 6)] == [("b", (6,))]
    (new,) = plan(scheduler).new
    assert new.tokens == (*hash_tokens("b", 7), 7, 6)


def test_preempted_request_can_finish_by_a_result_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead, second = plan(scheduler), plan(scheduler)
    assert [output.finish_reason for output in commit(scheduler, ahead, 5, EOS)] == [None, "stop"]
    assert scheduler.requests() == ("a",)
    assert len(commit(scheduler, second)) == 1


def test_request_is_not_admitted_when_it_would_take_the_last_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(request("a", 8, max_tokens=8))
    scheduler.add(request("b", 8, max_tokens=8))
    assert len(plan(scheduler).chunks) == 1, "there are enough blocks, but the first needs one for its next token"


# Preemption for waiting requests


def preempting(**answers: Callable[..., Any]) -> Policy:
    """A policy that preempts the last admitted request if the candidate's priority number is lower."""

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        last = running[-1]
        return last if last.priority > candidate.priority else None

    return policy(preempts=preempts, **answers)


def test_urgent_request_preempts_at_max_running() -> None:
    scheduler = make_scheduler(preempting(), max_running=1)
    scheduler.add(request("a", priority=1, max_tokens=3))
    turn(scheduler)
    scheduler.add(request("b", priority=0, max_tokens=3))
    step = plan(scheduler)
    assert work(step) == [(2, 0, 3, True)]
    assert step.finished == (1,)
    scheduler.add(request("c", priority=0, max_tokens=3))
    commit(scheduler, step)
    assert work(plan(scheduler)) == [2], "a request of equal priority waits"


def test_urgent_request_gets_the_prefill_tokens_of_the_preempted_one() -> None:
    scheduler = make_scheduler(preempting(), max_running=1, max_batch_tokens=8)
    scheduler.add(request("a", 12, priority=1))
    turn(scheduler)
    scheduler.add(request("b", 8, priority=0))
    assert work(plan(scheduler)) == [(2, 0, 8, True)]


def test_preempted_request_is_not_admitted_again_in_the_same_step() -> None:
    kept: list[RequestView] = []

    def order(waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        kept[:0] = waiting
        return kept

    scheduler = make_scheduler(policy(order=order, preempts=lambda candidate, running: running[0]), num_blocks=12)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 27))
    turn(scheduler)
    scheduler.add(request("c", 28))
    step = plan(scheduler)
    assert [new.sequence for new in step.new] == [3], "both others were preempted, though one of them would fit again"
    assert scheduler.stats().waiting == 2


def test_urgent_prefill_comes_before_the_rest_of_another() -> None:
    chosen = preempting(order=lambda waiting, now: sorted(waiting, key=lambda view: view.priority))
    scheduler = make_scheduler(chosen, max_batch_tokens=8)
    seen = []
    for name, length, priority in (("a", 20, 2), ("b", 11, 1), ("c", 2, 2), ("d", 3, 0)):
        scheduler.add(request(name, length, priority=priority, max_tokens=20))
        step = plan(scheduler)
        seen.append(work(step))
        commit(scheduler, step)
    seen += [work(plan(scheduler)) for _ in range(2)]
    assert seen == [
        [(1, 0, 8, False)],
        [(2, 0, 8, False)],
        [(2, 8, 3, True), (1, 8, 5, False)],
        [2, (3, 0, 3, True), (1, 13, 4, False)],
        [2, 3, (1, 17, 3, True), (4, 0, 2, True)],
        [2, 3, 1, 4],
    ]
    assert scheduler.stats().preemptions == 0


def test_preempts_is_not_called_for_prefills_unless_overridden() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(request("a", 20, priority=2))
    turn(scheduler)
    scheduler.add(request("b", 4, priority=0))
    assert work(plan(scheduler)) == [(1, 8, 8, False)]


def test_no_request_is_preempted_unless_the_candidate_then_fits() -> None:
    asked = []

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        asked.append([view.id for view in running])
        return next((view for view in running if view.priority > candidate.priority), None)

    scheduler = make_scheduler(policy(preempts=preempts), num_blocks=10)
    scheduler.add(request("a", 16, priority=0, max_tokens=9))
    scheduler.add(request("b", 4, priority=1, max_tokens=9))
    scheduler.add(request("c", 4, priority=1, max_tokens=9))
    turn(scheduler)
    scheduler.add(request("d", 24, priority=0, max_tokens=9))
    turn(scheduler)
    assert asked == [["a", "b", "c"], ["a", "c"], ["a"]]
    assert scheduler.stats().preemptions == 0
    scheduler.abort("d")
    scheduler.add(request("e", 16, priority=0, max_tokens=9))
    turn(scheduler)
    assert scheduler.stats().preemptions == 2, "both were preempted, and that was enough"
    assert [view.id for view in scheduler._queues.running_views] == ["a", "e"]


def test_mutual_preemption_ends() -> None:
    """The policy would let two requests preempt each other forever before either gets a token."""
    scheduler = make_scheduler(
        policy(preempts=lambda candidate, running: running[0]), max_running=1, max_batch_tokens=4, prefix_caching=False
    )
    for name in "ab":
        scheduler.add(request(name, 30, max_tokens=2))
    outputs = finish(scheduler, 200)
    assert {output.request for output in outputs if output.finish_reason == "length"} == {"a", "b"}
    assert scheduler.stats().preemptions >= 2 * MAX_PREEMPTIONS_FOR_WAITING


def test_request_can_be_preempted_again_after_a_token() -> None:
    scheduler = make_scheduler(preempting(), max_running=1)
    scheduler.add(request("a", priority=1))
    for number in range(MAX_PREEMPTIONS_FOR_WAITING + 2):
        assert [output.request for output in turn(scheduler)] == ["a"]
        scheduler.add(request(f"b{number}", priority=0, max_tokens=1))
        assert [output.request for output in turn(scheduler)] == [f"b{number}"]


def test_request_is_not_preempted_in_the_step_of_its_admission() -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: running[0]), max_running=1)
    for name in "ab":
        scheduler.add(request(name))
    assert [new.sequence for new in plan(scheduler).new] == [1]
    assert scheduler.stats().preemptions == 0


# Aborts


def test_abort_finishes_waiting_and_running_requests_and_ignores_unknown_ids() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    turn(scheduler)
    assert scheduler.abort("b") == Output(request="b", finish_reason="abort")
    assert scheduler.abort("b") is None
    assert scheduler.abort("a") == Output(request="a", finish_reason="abort")
    assert not scheduler.has_work
    assert scheduler.stats().blocks_used == 0
    scheduler.check()


def test_abort_compares_no_waiting_request_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting all of many waiting requests, newest first, would otherwise take time quadratic in their number."""
    scheduler = make_scheduler()
    for number in range(50):
        scheduler.add(request(f"r{number}", arrival=float(number % 7)))
    monkeypatch.setattr(RequestState, "__eq__", lambda state, other: pytest.fail("two requests were compared"))
    for number in (*range(49, 20, -1), *range(21)):
        assert scheduler.abort(f"r{number}") is not None
    assert not scheduler.has_work


def test_abort_discards_results_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    first, second = plan(scheduler), plan(scheduler)
    scheduler.abort("a")
    assert scheduler.stats().blocks_used == 0
    assert commit(scheduler, first) == commit(scheduler, second) == []


def test_abort_discards_the_result_in_flight_of_a_preempted_request() -> None:
    scheduler = make_scheduler(num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead, second = plan(scheduler), plan(scheduler)
    scheduler.abort("b")
    scheduler.check()
    scheduler.add(request("b", 7, max_tokens=10))
    assert [output.request for output in commit(scheduler, ahead)] == ["a"]
    assert [output.request for output in commit(scheduler, second)] == ["a"]
