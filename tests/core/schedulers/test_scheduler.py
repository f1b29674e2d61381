"""The scheduler from arrival to finish: invalid requests, stops, planning ahead."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.schedulers.policy import MAX_DECODE_STEPS, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import Output, RequestTimes, StepResult

from .scheduling import (
    EOS,
    commit,
    finish,
    hash_tokens,
    make_scheduler,
    plan,
    policy,
    request,
    turn,
    views,
    work,
)

# From arrival to finish


def test_request_prefills_then_decodes_until_max_tokens() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule(0.0) is None
    scheduler.add(request("a", 3, max_tokens=3))
    assert scheduler.has_work
    assert scheduler.requests() == ("a",)

    first = plan(scheduler)
    assert work(first) == [(1, 0, 3, True)]
    (new,) = first.new
    assert (new.sequence, new.tokens, new.prompt_len) == (1, tuple(hash_tokens("a", 3)), 3)
    assert [(sequence, len(blocks)) for sequence, blocks in first.blocks] == [(1, 1)]
    (output,) = commit(scheduler, first, 11)
    assert msgspec.structs.replace(output, times=None) == Output(request="a", tokens=(11,))

    second = plan(scheduler)
    assert work(second) == [1]
    assert (second.new, second.blocks, second.finished) == ((), (), ())
    commit(scheduler, second, 12)

    third = plan(scheduler)
    assert work(third) == [1]
    assert [(sequence, len(blocks)) for sequence, blocks in third.blocks] == [(1, 1)], "a block boundary is crossed"
    (output,) = commit(scheduler, third, 13)
    assert (output.tokens, output.finish_reason, output.stop_token) == ((13,), "length", None)
    assert not scheduler.has_work
    assert scheduler.stats().blocks_used == 0


def test_next_step_names_the_finished_sequence() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1))
    turn(scheduler)
    assert scheduler.schedule(0.0) is None
    scheduler.add(request("b", max_tokens=1))
    assert plan(scheduler).finished == (1,)


def test_times_are_in_the_first_and_the_last_output() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=3, arrival=1.0))
    outputs = [output for now in (2.0, 4.0, 6.0) for output in commit(scheduler, plan(scheduler, now), now=now + 1)]
    first, between, last = (output.times for output in outputs)
    assert first == RequestTimes(arrival=1.0, scheduled=2.0, first_token=3.0, finished=3.0)
    assert between is None
    assert last == RequestTimes(arrival=1.0, scheduled=2.0, first_token=3.0, finished=7.0)
    assert [output.num_tokens for output in outputs] == [0, 0, 3]


def test_tokens_of_steps_and_preemptions_of_requests_are_counted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(request("a", 2, max_tokens=12))
    scheduler.add(request("b", 2, max_tokens=12))
    tokens, outputs = [], []
    while scheduler.has_work:
        step = plan(scheduler)
        tokens.append(len(step.decodes) + sum(chunk.count for chunk in step.chunks))
        outputs += commit(scheduler, step)
    stats = scheduler.stats()
    assert stats.preemptions
    assert stats.preemptions == sum(output.preemptions for output in outputs)
    assert all(output.finish_reason for output in outputs if output.preemptions)
    assert (sum(stats.step_tokens.counts), stats.step_tokens.sum) == (len(tokens), sum(tokens))
    assert sum(stats.request_preemptions.counts) == 2
    assert stats.request_preemptions.sum == stats.preemptions


def test_add_generates_missing_seeds_and_keeps_given_ones() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    scheduler.add(request("c", seed=5))
    seeds = [new.params.seed for new in plan(scheduler).new]
    assert None not in seeds[:2]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 5


def test_stats_count_requests_blocks_and_tokens() -> None:
    scheduler = make_scheduler(num_blocks=20, max_running=1)
    scheduler.add(request("a", 9, max_tokens=2))
    scheduler.add(request("b", hash_tokens("a", 10), max_tokens=1))
    turn(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (1, 1, 3, 20)
    finish(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_cached) == (0, 0, 0, 2)
    assert (stats.prefix_queries, stats.prefix_hits) == (19, 8)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps, stats.preemptions) == (11, 3, 3, 0)


# Invalid requests


@pytest.mark.parametrize("limits", [{"max_len": 17}, {"num_blocks": 4}])
@pytest.mark.parametrize(
    ("prompt", "fields", "parameter"),
    [
        (0, {}, "prompt"),
        (17, {}, "prompt"),
        (12, {"max_tokens": 6}, "max_tokens"),
        (12, {"min_tokens": 6}, "min_tokens"),
    ],
)
def test_add_raises_for_a_request_that_can_never_run(
    prompt: int, fields: dict[str, int], parameter: str, limits: dict[str, int]
) -> None:
    scheduler = make_scheduler(**limits)
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add(request("a", prompt, **fields))
    assert error.value.parameter == parameter
    assert not scheduler.has_work


@pytest.mark.parametrize("limits", [{"max_len": 17}, {"num_blocks": 4}])
def test_longest_request_that_fits_runs(limits: dict[str, int]) -> None:
    scheduler = make_scheduler(**limits)
    scheduler.add(request("a", 16, max_tokens=1))
    scheduler.add(request("b", 12, max_tokens=5))
    assert len(finish(scheduler)) == 6


@pytest.mark.parametrize(("limits", "length"), [({"max_len": 10}, 7), ({"num_blocks": 3}, 10)])
def test_request_without_max_tokens_ends_when_the_context_is_full(limits: dict[str, int], length: int) -> None:
    scheduler = make_scheduler(**limits)
    scheduler.add(request("a", 3))
    outputs = finish(scheduler)
    assert len(outputs) == length
    assert outputs[-1].finish_reason == "length"


def test_add_raises_for_an_id_in_use() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add(request("a"))
    assert error.value.parameter == "id"
    scheduler.abort("a")
    scheduler.add(request("a"))


# Stopping


def plan_iterations(scheduler: Scheduler) -> int:
    """Run the next step and return its number of iterations."""
    step = plan(scheduler)
    commit(scheduler, step)
    return step.iterations


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (9,)}])
def test_eos_token_stops(params: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", **params))
    turn(scheduler, 8)
    (output,) = turn(scheduler, EOS)
    assert (output.tokens, output.finish_reason, output.stop_token) == ((EOS,), "stop", EOS)


def test_stop_token_of_the_request_stops() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(9,), ignore_eos=True))
    assert turn(scheduler, EOS)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason == "stop"


def test_stop_tokens_do_not_stop_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(9,), min_tokens=3))
    assert turn(scheduler, EOS)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason == "stop"


def test_stop_token_at_max_tokens_finishes_by_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1))
    assert turn(scheduler, EOS)[0].finish_reason == "stop"


def test_multi_step_step_samples_several_tokens_per_sequence() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 4))
    scheduler.add(request("a", 3, max_tokens=20))
    scheduler.add(request("b", 6, max_tokens=20))
    assert plan_iterations(scheduler) == 1, "a step with prefill chunks has one iteration"
    step = plan(scheduler)
    assert step.iterations == 4
    assert work(step) == [1, 2]
    assert [(sequence, len(blocks)) for sequence, blocks in step.blocks] == [(1, 1), (2, 1)]
    first, second = commit(scheduler, step, (5, 6, EOS, 8), (5, 6, 7, 8))
    assert (first.tokens, first.finish_reason, first.stop_token) == ((5, 6, EOS), "stop", EOS)
    assert second.tokens == (5, 6, 7, 8)
    assert work(plan(scheduler)) == [2]


def test_iterations_are_one_while_a_request_prefills() -> None:
    shares = iter([64, 2, 0, 64])
    scheduler = make_scheduler(
        policy(
            split=lambda budget, waiting, running: Split(decode=budget, prefill=next(shares)),
            decode_steps=lambda running, waiting: 4,
        )
    )
    scheduler.add(request("a", 3, max_tokens=20))
    turn(scheduler)
    scheduler.add(request("b", 6, max_tokens=20))
    assert work(plan(scheduler))[1:] == [(2, 0, 2, False)]
    step = plan(scheduler)
    assert work(step) == [1]
    assert step.iterations == 1


def test_iterations_are_limited_by_remaining_output() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 100))
    scheduler.add(request("a", 3, max_tokens=4))
    scheduler.add(request("b", 3, max_tokens=9))
    assert [plan_iterations(scheduler) for _ in range(3)] == [1, 3, 5]
    assert not scheduler.has_work


def test_iterations_are_limited_by_max_decode_steps() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 10_000), num_blocks=200, max_len=800)
    scheduler.add(request("a", 3, max_tokens=700))
    turn(scheduler)
    assert plan(scheduler).iterations == MAX_DECODE_STEPS


def test_iterations_are_limited_by_available_blocks() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 100), num_blocks=5)
    for name in "ab":
        scheduler.add(request(name, 4, max_tokens=13))
    turn(scheduler)
    step = plan(scheduler)
    assert step.iterations == 4, "one block each; a fifth iteration needs two blocks, and one is left"
    commit(scheduler, step)
    assert scheduler.stats().preemptions == 0


def test_block_with_tokens_past_a_stop_is_not_cached() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 8))
    scheduler.add(request("a", [1, 1, 1], max_tokens=20))
    turn(scheduler, 5)
    commit(scheduler, plan(scheduler), (6, EOS, 8, 9, 8, 9, 8, 9))
    assert scheduler.stats().blocks_cached == 1, "the block of 1 1 1 5, not that of 6 and EOS"


def test_step_decodes_is_the_same_object_until_membership_changes() -> None:
    scheduler = make_scheduler()
    for name, max_tokens in (("a", 20), ("b", 8)):
        scheduler.add(request(name, 3, max_tokens=max_tokens))
    turn(scheduler)
    seen = []
    for number in range(8):
        if number == 3:
            scheduler.add(request("c", 3, max_tokens=20))
        step = plan(scheduler)
        commit(scheduler, step)
        seen.append(step.decodes)
    assert seen == [(1, 2)] * 4 + [(1, 2, 3)] * 3 + [(1, 3)]
    assert [now is before for before, now in pairwise(seen)] == [
        *(True, True, True),  # a block boundary is crossed here
        *(False, True, True),
        False,
    ]


def test_sequence_beyond_the_decode_share_is_deferred_and_resumes() -> None:
    shares = iter([64, 64, 1, 1, 64, 64])
    scheduler = make_scheduler(
        policy(split=lambda budget, waiting, running: Split(decode=next(shares), prefill=budget))
    )
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=20))
    turn(scheduler)
    seen = []
    for _ in range(5):
        step = plan(scheduler)
        seen.append((step.decodes, [(view.computed_tokens, view.output_tokens) for view in views(scheduler)]))
        commit(scheduler, step)
    assert seen == [
        ((1, 2), [(4, 2), (4, 2)]),
        ((1,), [(5, 3), (4, 2)]),
        ((1,), [(6, 4), (4, 2)]),
        ((1, 2), [(7, 5), (5, 3)]),
        ((1, 2), [(8, 6), (6, 4)]),
    ]


def test_sequence_with_all_output_planned_uses_no_decode_share() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=1, prefill=budget)))
    for name, max_tokens in (("a", 3), ("b", 2)):
        scheduler.add(request(name, 3, max_tokens=max_tokens))
    steps = [plan(scheduler) for _ in range(2)]
    seen = [step.decodes for step in steps]
    for _ in range(2):
        steps.append(plan(scheduler))
        seen.append(steps[-1].decodes)
        commit(scheduler, steps.pop(0))
    assert seen == [(), (1,), (1,), (2,)]


# Planning one step ahead


def test_step_is_planned_before_the_previous_result_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=3))
    steps = [plan(scheduler), plan(scheduler)]
    assert [work(step) for step in steps] == [[(1, 0, 3, True)], [1]]
    commit(scheduler, steps[0])
    steps.append(plan(scheduler))
    commit(scheduler, steps[1])
    assert scheduler.schedule(0.0) is None, "the last token is in flight"
    assert commit(scheduler, steps[2])[0].finish_reason == "length"


def test_tokens_sampled_past_a_stop_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=9))
    first, second = plan(scheduler), plan(scheduler)
    assert commit(scheduler, first, EOS)[0].finish_reason == "stop"
    assert scheduler.stats().blocks_used == 0
    scheduler.add(request("b", 3, max_tokens=9))
    third = plan(scheduler)
    assert third.finished == (1,)
    assert commit(scheduler, second, 5) == []
    assert [output.request for output in commit(scheduler, third)] == ["b"]


def test_commit_raises_for_results_out_of_order_or_of_another_shape() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=9))
    first, second = plan(scheduler), plan(scheduler)
    with pytest.raises(ExecutorError, match="out of order"):
        commit(scheduler, second)
    for rows in ((), ((5,), (6,)), ((5, 6),), ((),)):
        with pytest.raises(ExecutorError, match="does not hold"):
            scheduler.commit(first, StepResult(step=first.id, tokens=rows), 0.0)
    assert commit(scheduler, first, 5)[0].tokens == (5,)
