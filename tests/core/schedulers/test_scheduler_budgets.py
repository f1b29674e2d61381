"""Token and sequence budgets of a step, and the policy's shares of the tokens."""

from __future__ import annotations

from engine.core.schedulers.policy import Split

from .scheduling import commit, make_scheduler, plan, policy, request, turn, work


def test_long_prompt_is_computed_in_chunks_after_the_decodes() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(request("a", 4, max_tokens=20))
    scheduler.add(request("b", 10, max_tokens=20))
    scheduler.add(request("c", 5, max_tokens=20))
    seen = []
    for _ in range(4):
        step = plan(scheduler)
        seen.append(work(step))
        commit(scheduler, step)
    assert seen == [
        [(1, 0, 4, True), (2, 0, 4, False)],
        [1, (2, 4, 6, True), (3, 0, 1, False)],
        [1, 2, (3, 1, 4, True)],
        [1, 2, 3],
    ]


def test_no_more_than_max_running_requests_run() -> None:
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(request(name, 3, max_tokens=2))
    assert [chunk.sequence for chunk in plan(scheduler).chunks] == [1, 2]
    assert scheduler.stats().waiting == 1


def test_no_request_is_admitted_without_tokens_left_in_the_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=2)
    for name in "abc":
        scheduler.add(request(name, 1, max_tokens=2))
    for _ in range(2):
        assert [output.request for output in turn(scheduler)] == ["a", "b"]
    assert [output.request for output in turn(scheduler)] == ["c"]


def test_split_limits_decode_and_prefill_tokens() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=1, prefill=2)))
    for name in "abc":
        scheduler.add(request(name, 3, max_tokens=9))
    seen = []
    for _ in range(4):
        step = plan(scheduler)
        seen.append(work(step))
        commit(scheduler, step)
    assert seen == [
        [(1, 0, 2, False)],
        [(1, 2, 1, True), (2, 0, 1, False)],
        [1, (2, 1, 2, True)],
        [1, (3, 0, 2, False)],
    ]
