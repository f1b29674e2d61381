"""Requests that end because no token could be sampled."""

from __future__ import annotations

import math

import pytest

from engine.core.types import NO_TOKEN, StepResult, TokenLogprobs

from .scheduling import commit, finish, make_scheduler, plan, policy, request, turn, work


@pytest.mark.parametrize("generated", [0, 1, 5])
def test_a_request_without_a_token_ends_with_an_error_and_the_others_go_on(generated: int) -> None:
    scheduler = make_scheduler(not_built_in="; not built in: attention 'mine' of engine-mine 0.4")
    for name in "abc":
        scheduler.add(request(name, 9, max_tokens=8, min_tokens=3))
    for _ in range(generated):
        turn(scheduler)
    first, failed, last = turn(scheduler, 7, NO_TOKEN, 7)
    assert (first.tokens, first.finish_reason, last.tokens, last.finish_reason) == ((7,), None, (7,), None)
    assert (failed.request, failed.tokens, failed.finish_reason) == ("b", (), "error")
    assert str(failed.error).startswith(f"request b: the logits after {9 + generated} tokens are not finite")
    assert str(failed.error).endswith("try bfloat16 or float32; not built in: attention 'mine' of engine-mine 0.4")
    assert not failed.refused
    ended = {output.request: output.finish_reason for output in finish(scheduler) if output.finish_reason}
    assert ended == {"a": "length", "c": "length"}


def test_tokens_of_earlier_iterations_are_kept() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 4))
    scheduler.add(request("a", max_tokens=20))
    scheduler.add(request("b", max_tokens=20))
    turn(scheduler)
    failed, other = commit(scheduler, plan(scheduler), (5, 6, NO_TOKEN, 8), (5, 6, 7, 8))
    assert (failed.tokens, failed.finish_reason) == ((5, 6), "error")
    assert other.tokens == (5, 6, 7, 8)
    assert scheduler.stats().generation_tokens == 2 + 2 + 4


def test_a_step_in_flight_of_a_failed_request_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=9))
    scheduler.add(request("b", max_tokens=9))
    turn(scheduler)
    first, second = plan(scheduler), plan(scheduler)
    assert [output.finish_reason for output in commit(scheduler, first, NO_TOKEN, 7)] == ["error", None]
    assert [output.request for output in commit(scheduler, second, 7, 7)] == ["b"]
    third = plan(scheduler)
    assert (work(third), third.finished) == ([2], (1,))


def test_no_block_of_a_failed_request_stays_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(request("a", 18, max_tokens=9))
    turn(scheduler)
    turn(scheduler)
    assert scheduler.stats().prefix_hits == 0
    (failed,) = turn(scheduler, NO_TOKEN)
    assert failed.finish_reason == "error"
    assert (scheduler.stats().blocks_used, scheduler.stats().blocks_cached) == (0, 0)
    scheduler.add(request("a", 18, max_tokens=1))
    assert plan(scheduler).chunks[0].start == 0


def test_blocks_of_a_request_that_fails_after_its_preemption_leave_the_prefix_cache() -> None:
    scheduler = make_scheduler(policy(victim=lambda running: running[0]), num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    ahead = plan(scheduler)
    late = plan(scheduler)
    assert (scheduler.stats().preemptions, work(late)) == (1, [2])
    assert scheduler.stats().blocks_cached == 1
    outputs = commit(scheduler, ahead, NO_TOKEN, 7)
    assert [output.finish_reason for output in outputs] == ["error", None]
    assert scheduler.stats().blocks_cached == 0
    commit(scheduler, late)
    assert {output.request for output in finish(scheduler)} == {"b"}


def test_prompt_logprobs_that_are_not_a_number_end_the_request() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(request("a", 12, max_tokens=9, prompt_logprobs=0))
    step = plan(scheduler)
    scored = tuple(TokenLogprobs(token=0, logprob=math.nan if at == 3 else -1.0, rank=1) for at in range(8))
    result = StepResult(step=step.id, tokens=((),), prompt_logprobs=((1, scored),))
    (failed,) = scheduler.commit(step, result, 0.0)
    assert (failed.finish_reason, failed.prompt_logprobs) == ("error", None)
    scheduler.check()
    assert not scheduler.has_work
