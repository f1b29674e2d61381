"""A request's way through the scheduler: refusals, stops, steps ahead, budgets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.schedulers.policy import MAX_DECODE_STEPS, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import Output, StepResult

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

# A request's way


def test_a_prompt_then_its_tokens() -> None:
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
    assert output == Output(request="a", tokens=(11,))

    second = plan(scheduler)
    assert work(second) == [1]
    assert (second.new, second.blocks, second.finished) == ((), (), ())
    commit(scheduler, second, 12)

    third = plan(scheduler)
    assert work(third) == [1]
    assert [(sequence, len(blocks)) for sequence, blocks in third.blocks] == [(1, 1)], "a page is crossed"
    (output,) = commit(scheduler, third, 13)
    assert (output.tokens, output.finish_reason, output.stop_token) == ((13,), "length", None)
    assert not scheduler.has_work
    assert scheduler.stats().blocks_used == 0


def test_the_runner_hears_of_the_end_with_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1))
    turn(scheduler)
    assert scheduler.schedule(0.0) is None
    scheduler.add(request("b", max_tokens=1))
    assert plan(scheduler).finished == (1,)


def test_times() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=2, arrival=1.0))
    step = plan(scheduler, 2.0)
    (output,) = commit(scheduler, step, now=3.0)
    assert output.times is None
    (output,) = commit(scheduler, plan(scheduler, 4.0), now=5.0)
    assert output.times is not None
    times = output.times
    assert (times.arrival, times.scheduled, times.first_token, times.finished) == (1.0, 2.0, 3.0, 5.0)


def test_a_seed_is_made_and_a_given_one_kept() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    scheduler.add(request("c", seed=5))
    seeds = [new.params.seed for new in plan(scheduler).new]
    assert None not in seeds[:2]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 5


def test_stats() -> None:
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


# Refusals


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
def test_what_can_never_run_is_refused(
    prompt: int, fields: dict[str, int], parameter: str, limits: dict[str, int]
) -> None:
    scheduler = make_scheduler(**limits)
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add(request("a", prompt, **fields))
    assert error.value.parameter == parameter
    assert not scheduler.has_work


@pytest.mark.parametrize("limits", [{"max_len": 17}, {"num_blocks": 4}])
def test_the_longest_that_fits_runs(limits: dict[str, int]) -> None:
    scheduler = make_scheduler(**limits)
    scheduler.add(request("a", 16, max_tokens=1))
    scheduler.add(request("b", 12, max_tokens=5))
    assert len(finish(scheduler)) == 6


@pytest.mark.parametrize(("limits", "length"), [({"max_len": 10}, 7), ({"num_blocks": 3}, 10)])
def test_without_max_tokens_it_ends_when_the_context_is_full(limits: dict[str, int], length: int) -> None:
    scheduler = make_scheduler(**limits)
    scheduler.add(request("a", 3))
    outputs = finish(scheduler)
    assert len(outputs) == length
    assert outputs[-1].finish_reason == "length"


def test_a_second_request_of_one_id_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add(request("a"))
    assert error.value.parameter == "id"
    scheduler.abort("a")
    scheduler.add(request("a"))


# Stopping


def plan_iterations(scheduler: Scheduler) -> int:
    """Iterations of the next step, which is run."""
    step = plan(scheduler)
    commit(scheduler, step)
    return step.iterations


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (9,)}])
def test_the_models_end_token_stops(params: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", **params))
    turn(scheduler, 8)
    (output,) = turn(scheduler, EOS)
    assert (output.tokens, output.finish_reason, output.stop_token) == ((EOS,), "stop", EOS)


def test_a_requests_own_stop_token_stops() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(9,), ignore_eos=True))
    assert turn(scheduler, EOS)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason == "stop"


def test_nothing_stops_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(9,), min_tokens=3))
    assert turn(scheduler, EOS)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason is None
    assert turn(scheduler, 9)[0].finish_reason == "stop"


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1))
    assert turn(scheduler, EOS)[0].finish_reason == "stop"


def test_several_tokens_a_step() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 4))
    scheduler.add(request("a", 3, max_tokens=20))
    scheduler.add(request("b", 6, max_tokens=20))
    assert plan_iterations(scheduler) == 1, "prompts are computed once"
    step = plan(scheduler)
    assert step.iterations == 4
    assert work(step) == [1, 2]
    assert [(sequence, len(blocks)) for sequence, blocks in step.blocks] == [(1, 1), (2, 1)]
    first, second = commit(scheduler, step, (5, 6, EOS, 8), (5, 6, 7, 8))
    assert (first.tokens, first.finish_reason, first.stop_token) == ((5, 6, EOS), "stop", EOS)
    assert second.tokens == (5, 6, 7, 8)
    assert work(plan(scheduler)) == [2]


def test_one_token_a_step_while_a_prompt_waits_for_its_next_chunk() -> None:
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


def test_tokens_a_step_are_clamped_to_what_is_left() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 100))
    scheduler.add(request("a", 3, max_tokens=4))
    scheduler.add(request("b", 3, max_tokens=9))
    assert [plan_iterations(scheduler) for _ in range(3)] == [1, 3, 5]
    assert not scheduler.has_work


def test_tokens_a_step_are_clamped_to_what_a_runner_takes() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 10_000), num_blocks=200, max_len=800)
    scheduler.add(request("a", 3, max_tokens=700))
    turn(scheduler)
    assert plan(scheduler).iterations == MAX_DECODE_STEPS


def test_tokens_a_step_are_clamped_to_the_blocks() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 100), num_blocks=5)
    for name in "ab":
        scheduler.add(request(name, 4, max_tokens=13))
    turn(scheduler)
    step = plan(scheduler)
    assert step.iterations == 4, "one block each; the fifth would let only one of them go on"
    commit(scheduler, step)
    assert scheduler.stats().preemptions == 0


def test_no_block_is_shared_that_holds_tokens_sampled_past_a_stop() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 8))
    scheduler.add(request("a", [1, 1, 1], max_tokens=20))
    turn(scheduler, 5)
    commit(scheduler, plan(scheduler), (6, EOS, 8, 9, 8, 9, 8, 9))
    assert scheduler.stats().blocks_cached == 1, "the block of 1 1 1 5, not that of 6 and the end token"


def test_decodes_are_the_same_object_until_somebody_comes_or_goes() -> None:
    scheduler = make_scheduler()
    for name, most in (("a", 20), ("b", 8)):
        scheduler.add(request(name, 3, max_tokens=most))
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
        *(True, True, True),  # a page was crossed here
        *(False, True, True),
        False,
    ]


def test_a_sequence_beyond_the_room_is_held_and_goes_on_where_it_was() -> None:
    rooms = iter([64, 64, 1, 1, 64, 64])
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=next(rooms), prefill=budget)))
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


def test_who_has_all_tokens_planned_holds_nobody_back() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=1, prefill=budget)))
    for name, most in (("a", 3), ("b", 2)):
        scheduler.add(request(name, 3, max_tokens=most))
    steps = [plan(scheduler) for _ in range(2)]
    seen = [step.decodes for step in steps]
    for _ in range(2):
        steps.append(plan(scheduler))
        seen.append(steps[-1].decodes)
        commit(scheduler, steps.pop(0))
    assert seen == [(), (1,), (1,), (2,)]


# One step ahead


def test_a_step_is_planned_before_the_one_before_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=3))
    steps = [plan(scheduler), plan(scheduler)]
    assert [work(step) for step in steps] == [[(1, 0, 3, True)], [1]]
    commit(scheduler, steps[0])
    steps.append(plan(scheduler))
    commit(scheduler, steps[1])
    assert scheduler.schedule(0.0) is None, "its last token is on the way"
    assert commit(scheduler, steps[2])[0].finish_reason == "length"


def test_what_is_sampled_past_a_stop_is_dropped() -> None:
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


def test_results_come_in_order_and_in_shape() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=9))
    first, second = plan(scheduler), plan(scheduler)
    with pytest.raises(ExecutorError, match="out of turn"):
        commit(scheduler, second)
    for rows in ((), ((5,), (6,)), ((5, 6),), ((),)):
        with pytest.raises(ExecutorError, match="does not hold"):
            scheduler.commit(first, StepResult(step=first.id, tokens=rows), 0.0)
    assert commit(scheduler, first, 5)[0].tokens == (5,)


# Budgets


def test_a_long_prompt_is_computed_in_chunks_behind_the_decodes() -> None:
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


def test_no_more_run_than_there_are_seats() -> None:
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(request(name, 3, max_tokens=2))
    assert [piece.sequence for piece in plan(scheduler).chunks] == [1, 2]
    assert scheduler.stats().waiting == 1


def test_nobody_is_admitted_without_tokens_left_in_the_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=2)
    for name in "abc":
        scheduler.add(request(name, 1, max_tokens=2))
    for _ in range(2):
        assert [output.request for output in turn(scheduler)] == ["a", "b"]
    assert [output.request for output in turn(scheduler)] == ["c"]


def test_the_policy_splits_the_budget() -> None:
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
