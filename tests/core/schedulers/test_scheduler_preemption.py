"""Who has to go: victims, the displaced and the aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.core.schedulers.planner import MAX_DISPLACED
from engine.core.schedulers.policy import RequestView, Split
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

# Preemption


def test_a_victim_is_computed_again_from_all_its_tokens() -> None:
    scheduler = crowded()
    step = plan(scheduler)
    assert work(step) == [1], "the last block goes to the first, the second gives way"
    assert scheduler.stats().preemptions == 1
    commit(scheduler, step)
    while scheduler.stats().running:
        step = plan(scheduler)
        assert not step.new, "there is no room before the first has ended"
        commit(scheduler, step)
    step = plan(scheduler)
    assert step.finished == (1,)
    (new,) = step.new
    assert (new.sequence, new.tokens, new.prompt_len) == (3, (*hash_tokens("b", 7), 7, 7), 7)
    outputs = [*commit(scheduler, step), *finish(scheduler)]
    assert [output.tokens for output in outputs] == [(7,)] * 8, "two of ten were there already"
    assert outputs[-1].finish_reason == "length"


def test_a_victim_finds_its_blocks_in_the_cache() -> None:
    scheduler = crowded()
    commit(scheduler, plan(scheduler))
    scheduler.abort("a")
    step = plan(scheduler)
    assert work(step) == [(3, 8, 1, True)]
    assert not step.decodes, "its token is new to the runner"


def test_a_victim_leaves_the_step_being_planned() -> None:
    scheduler = crowded(policy(victim=lambda running: running[0]))
    step = plan(scheduler)
    assert work(step) == [2], "the first had its slice, and lost it to the second"
    assert step.finished == (1,)
    assert [sequence for sequence, _ in step.blocks] == [2]


def test_a_victim_makes_room_for_one_held_back() -> None:
    rooms = iter([64, 64, *[1] * 20])
    scheduler = crowded(
        policy(
            split=lambda budget, waiting, running: Split(decode=next(rooms), prefill=budget),
            victim=lambda running: running[0],
        )
    )
    seen = [plan(scheduler).decodes for _ in range(5)]
    assert seen == [(1,)] * 4 + [(2,)], "the first took the last block, and gave way when it needed another"
    assert scheduler.stats().preemptions == 1


def test_nobody_is_admitted_in_a_step_for_which_somebody_was_preempted() -> None:
    scheduler = crowded()
    scheduler.add(request("c", 1, max_tokens=1, arrival=1.0))
    step = plan(scheduler)
    assert work(step) == [1], "c overtook the victim"


def test_a_victim_waits_for_its_results_under_way() -> None:
    scheduler = make_scheduler(num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead = plan(scheduler)
    second = plan(scheduler)
    assert work(second) == [1]
    scheduler.abort("a")
    assert scheduler.schedule(0.0) is None, "b has a token under way"
    assert [(output.request, output.tokens) for output in commit(scheduler, ahead, 5, 6)] == [("b", (6,))]
    (new,) = plan(scheduler).new
    assert new.tokens == (*hash_tokens("b", 7), 7, 6)


def test_a_victim_can_end_by_its_result_under_way() -> None:
    scheduler = make_scheduler(num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead, second = plan(scheduler), plan(scheduler)
    assert [output.finish_reason for output in commit(scheduler, ahead, 5, EOS)] == [None, "stop"]
    assert scheduler.requests() == ("a",)
    assert len(commit(scheduler, second)) == 1


def test_a_request_is_not_admitted_into_the_last_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(request("a", 8, max_tokens=8))
    scheduler.add(request("b", 8, max_tokens=8))
    assert len(plan(scheduler).chunks) == 1, "the blocks are there, but the first needs one with its next token"


# Displacement


def displacing(**answers: Callable[..., Any]) -> Policy:
    """Waiting requests take the place of the last admitted one of a greater priority number."""

    def preempts(candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        last = running[-1]
        return last if last.priority > candidate.priority else None

    return policy(preempts=preempts, **answers)


def test_an_urgent_request_takes_a_seat() -> None:
    scheduler = make_scheduler(displacing(), max_running=1)
    scheduler.add(request("a", priority=1, max_tokens=3))
    turn(scheduler)
    scheduler.add(request("b", priority=0, max_tokens=3))
    step = plan(scheduler)
    assert work(step) == [(2, 0, 3, True)]
    assert step.finished == (1,)
    scheduler.add(request("c", priority=0, max_tokens=3))
    commit(scheduler, step)
    assert work(plan(scheduler)) == [2], "an equal one waits"


def test_the_tokens_of_a_displaced_prompt_are_for_the_urgent_one() -> None:
    scheduler = make_scheduler(displacing(), max_running=1, max_batch_tokens=8)
    scheduler.add(request("a", 12, priority=1))
    turn(scheduler)
    scheduler.add(request("b", 8, priority=0))
    assert work(plan(scheduler)) == [(2, 0, 8, True)]


def test_who_was_displaced_is_not_admitted_again_in_the_same_step() -> None:
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
    assert [new.sequence for new in step.new] == [3], "both others had to go, though one of them would fit again"
    assert scheduler.stats().waiting == 2


def test_an_urgent_prompt_comes_before_the_rest_of_another() -> None:
    chosen = displacing(order=lambda waiting, now: sorted(waiting, key=lambda view: view.priority))
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


def test_a_policy_that_lets_nobody_displace_is_not_asked_about_prompts() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(request("a", 20, priority=2))
    turn(scheduler)
    scheduler.add(request("b", 4, priority=0))
    assert work(plan(scheduler)) == [(1, 8, 8, False)]


def test_nobody_is_displaced_in_vain() -> None:
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
    assert scheduler.stats().preemptions == 2, "both had to go, and that was enough"
    assert [view.id for view in scheduler._queues.running_views] == ["a", "e"]


def test_displacement_cannot_go_on_for_ever() -> None:
    """A policy that would let two requests displace one another before either gets a token."""
    scheduler = make_scheduler(
        policy(preempts=lambda candidate, running: running[0]), max_running=1, max_batch_tokens=4, prefix_caching=False
    )
    for name in "ab":
        scheduler.add(request(name, 30, max_tokens=2))
    outputs = finish(scheduler, 200)
    assert {output.request for output in outputs if output.finish_reason == "length"} == {"a", "b"}
    assert scheduler.stats().preemptions >= 2 * MAX_DISPLACED


def test_who_got_a_token_in_between_can_be_displaced_again() -> None:
    scheduler = make_scheduler(displacing(), max_running=1)
    scheduler.add(request("a", priority=1))
    for number in range(MAX_DISPLACED + 2):
        assert [output.request for output in turn(scheduler)] == ["a"]
        scheduler.add(request(f"b{number}", priority=0, max_tokens=1))
        assert [output.request for output in turn(scheduler)] == [f"b{number}"]


def test_nobody_is_displaced_in_the_step_of_his_admission() -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: running[0]), max_running=1)
    for name in "ab":
        scheduler.add(request(name))
    assert [new.sequence for new in plan(scheduler).new] == [1]
    assert scheduler.stats().preemptions == 0


# Abort


def test_abort_waiting_running_and_unknown() -> None:
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


def test_abort_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    first, second = plan(scheduler), plan(scheduler)
    scheduler.abort("a")
    assert scheduler.stats().blocks_used == 0
    assert commit(scheduler, first) == commit(scheduler, second) == []


def test_abort_of_a_victim_with_a_result_under_way() -> None:
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
