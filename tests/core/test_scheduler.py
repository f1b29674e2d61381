from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from engine.core.errors import ExecutorError, InvalidRequestError, PluginError
from engine.core.kv_cache import BlockManager
from engine.core.planner import MAX_DISPLACED
from engine.core.scheduler import Scheduler
from engine.core.schedulers import RequestView, SchedulingPolicy, Split
from engine.core.types import Output, Request, SamplingParams, Step, StepResult, TokenLogprobs

PAGE = 4
EOS = 2


class Policy(SchedulingPolicy):
    """In order of arrival, last admitted first to go; a test replaces what it is about."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return waiting

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[-1]


def policy(**answers: Callable[..., Any]) -> Policy:
    """A Policy with other answers."""
    made = type("Changed", (Policy,), {name: staticmethod(answer) for name, answer in answers.items()})()
    assert isinstance(made, Policy)
    return made


def make_scheduler(
    chosen: SchedulingPolicy | None = None, *, num_blocks: int = 100, prefix_caching: bool = True, **limits: int
) -> Scheduler:
    return Scheduler(
        chosen or Policy(),
        BlockManager(num_blocks, PAGE, prefix_caching=prefix_caching),
        eos_tokens=frozenset({EOS}),
        **{"max_batch_tokens": 64, "max_running": 8, "max_len": 1000, **limits},
    )


def request(name: str, prompt: int | Sequence[int] = 3, **fields: Any) -> Request:
    """A request with a prompt of its own of that length, or with these tokens; fields of params may be given too."""
    tokens = tuple(hash_tokens(name, prompt)) if isinstance(prompt, int) else tuple(prompt)
    own = {key: fields.pop(key) for key in ("priority", "arrival", "salt") if key in fields}
    return Request(id=name, prompt=tokens, params=SamplingParams(**fields), **own)


def hash_tokens(name: str, length: int) -> list[int]:
    return [1000 * ord(name[0]) + position for position in range(length)]


def plan(scheduler: Scheduler, now: float = 0.0) -> Step:
    step = scheduler.schedule(now)
    assert step is not None
    scheduler.check()
    return step


def commit(scheduler: Scheduler, step: Step, *tokens: int | tuple[int, ...], now: float = 0.0) -> list[Output]:
    """Commit with these tokens, one (or one an iteration) a sequence that samples; without any, 7 for each."""
    sampling = len(step.decodes) + sum(piece.sample for piece in step.chunks)
    columns = [
        column if isinstance(column, tuple) else (column,) * step.iterations for column in tokens or [7] * sampling
    ]
    result = StepResult(step=step.id, tokens=tuple(zip(*columns, strict=True)) if columns else ((),))
    outputs = scheduler.commit(step, result, now)
    scheduler.check()
    return outputs


def turn(scheduler: Scheduler, *tokens: int) -> list[Output]:
    return commit(scheduler, plan(scheduler), *tokens)


def finish(scheduler: Scheduler, most: int = 500) -> list[Output]:
    """Run until nothing is left."""
    outputs: list[Output] = []
    for _ in range(most):
        if not scheduler.has_work:
            return outputs
        outputs += turn(scheduler)
    raise AssertionError("no end")


def views(scheduler: Scheduler) -> tuple[RequestView, ...]:
    """What a policy sees of the running requests."""
    return scheduler._queues.running_views


def work(step: Step) -> list[int | tuple[int, int, int, bool]]:
    """The sequences that decode, then the chunks."""
    return [*step.decodes, *((piece.sequence, piece.start, piece.count, piece.sample) for piece in step.chunks)]


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


# Prefix cache


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 10, max_tokens=1))
    turn(scheduler)
    scheduler.add(request("b", hash_tokens("a", 12), max_tokens=2))
    step = plan(scheduler)
    assert work(step) == [(2, 8, 4, True)]
    assert [(sequence, len(blocks)) for sequence, blocks in step.blocks] == [(2, 3)]
    assert len(step.new[0].tokens) == 12
    assert commit(scheduler, step)[0].cached_tokens == 8


def test_a_prompt_that_is_cached_whole_computes_its_last_block() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(request(name, range(100, 108), max_tokens=1))
        step = plan(scheduler)
        commit(scheduler, step)
    assert work(step) == [(2, 4, 4, True)]


def test_output_is_cached_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 1, 1], max_tokens=6))
    finish(scheduler)
    scheduler.add(request("b", [1, 1, 1, 7, 7, 7, 7, 7, 5], max_tokens=1))
    assert turn(scheduler)[0].cached_tokens == 8


def test_blocks_are_shared_only_once_their_step_is_committed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 8, max_tokens=9))
    first = plan(scheduler)
    scheduler.add(request("b", hash_tokens("a", 9), max_tokens=1))
    second = plan(scheduler)
    assert work(second) == [1, (2, 0, 9, True)]
    commit(scheduler, first)
    commit(scheduler, second)


def test_a_block_is_shared_only_when_its_last_token_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 7, max_tokens=9))
    turn(scheduler)
    assert len(scheduler._queues.running) == 1
    assert len(scheduler._blocks._by_digest) == 1, "the eighth token is known, but not in the cache"
    turn(scheduler)
    assert len(scheduler._blocks._by_digest) == 2


def test_salts_keep_prefixes_apart() -> None:
    scheduler = make_scheduler()
    for name, salt, cached in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8)):
        scheduler.add(request(name, range(100, 110), max_tokens=1, salt=salt))
        assert turn(scheduler)[0].cached_tokens == cached


def scores(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in tokens)


def test_prompt_logprobs_are_put_together_over_chunks_and_not_cached() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    scheduler.add(request("a", [1, 2, 3, 4, 5, 6], max_tokens=1))
    while scheduler.has_work:
        turn(scheduler)
    scheduler.add(request("b", [1, 2, 3, 4, 5, 6], max_tokens=2, prompt_logprobs=0, logprobs=0))
    step = plan(scheduler)
    assert work(step) == [(2, 0, 4, False)]
    result = StepResult(step=step.id, tokens=((),), prompt_logprobs=((2, scores(2, 3, 4, 5)),))
    assert scheduler.commit(step, result, 0.0) == []
    step = plan(scheduler)
    result = StepResult(step=step.id, tokens=((7,),), logprobs=(scores(7),), prompt_logprobs=((2, scores(6)),))
    (output,) = scheduler.commit(step, result, 0.0)
    assert output.prompt_logprobs == scores(2, 3, 4, 5, 6)
    assert output.logprobs == scores(7)
    assert scheduler.stats().prefix_queries == 6, "only the first request's prompt was looked up"
    (output,) = turn(scheduler)
    assert output.prompt_logprobs is None
    assert output.logprobs == ()


def test_logprobs_end_where_the_tokens_do() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 3))
    scheduler.add(request("a", max_tokens=9, logprobs=0))
    scheduler.add(request("b", max_tokens=9))
    turn(scheduler)
    step = plan(scheduler)
    logprobs = tuple((entry, None) for entry in scores(5, EOS, 6))
    result = StepResult(step=step.id, tokens=((5, 5), (EOS, 6), (6, 7)), logprobs=logprobs)
    first, second = scheduler.commit(step, result, 0.0)
    assert first.logprobs == scores(5, EOS)
    assert second.logprobs == ()


# Preemption


def crowded(chosen: SchedulingPolicy | None = None) -> Scheduler:
    """Two sequences of 8 tokens each, in their decode phase, which fill all 5 blocks but one."""
    scheduler = make_scheduler(chosen, num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    turn(scheduler)
    assert scheduler.stats().blocks_used == 4
    return scheduler


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


# What policies are asked


def test_a_policy_is_asked_only_what_it_has_an_answer_of_its_own_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("asked")

    for question in ("preempts", "split", "decode_steps"):
        monkeypatch.setattr(SchedulingPolicy, question, unexpected)
    scheduler = make_scheduler(max_running=1)
    for name in "ab":
        scheduler.add(request(name, max_tokens=3))
    assert len(finish(scheduler)) == 6


# Wrong policies


class Failing(Policy):
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        raise LookupError("lost my list")


def test_a_failing_policy_is_named_with_its_cause_and_leaves_nothing_half_done() -> None:
    scheduler = make_scheduler(Failing())
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=r"Failing failed in order\(\): LookupError: lost my list") as error:
        scheduler.schedule(0.0)
    assert isinstance(error.value.__cause__, LookupError)
    scheduler.check()
    assert scheduler.abort("a") is not None


def foreign_views() -> list[RequestView]:
    """Of a request of another scheduler, of a name that is known here."""
    other = make_scheduler()
    other.add(request("a"))
    return list(other._queues.waiting_views)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("order", lambda waiting, now: ["a"]),
        ("order", lambda waiting, now: foreign_views()),
        ("order", lambda waiting, now: None),
        ("split", lambda budget, waiting, running: None),
        ("split", lambda budget, waiting, running: Split(decode=1.5, prefill=2)),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_answer_names_policy_and_question(question: str, answer: Callable[..., Any]) -> None:
    scheduler = make_scheduler(policy(**{question: answer}))
    scheduler.add(request("a"))
    with pytest.raises(PluginError, match=rf"Changed .*{question}\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_the_runner_is_not_told_of_the_end_of_what_it_never_saw() -> None:
    answers = [lambda waiting: [waiting[0], None], lambda waiting: waiting]
    scheduler = make_scheduler(policy(order=lambda waiting, now: answers.pop(0)(waiting)))
    for name in "ab":
        scheduler.add(request(name))
    with pytest.raises(PluginError):
        scheduler.schedule(0.0)
    scheduler.abort("a")
    step = plan(scheduler)
    assert step.finished == ()
    assert [new.sequence for new in step.new] == [2]


@pytest.mark.parametrize("answer", [None, "b"])
def test_an_impossible_victim(answer: object) -> None:
    scheduler = crowded(policy(victim=lambda running: answer))
    with pytest.raises(PluginError, match=r"Changed answered .* to victim\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_an_impossible_number_of_steps_is_refused_and_nothing_is_lost() -> None:
    answers = iter([None, 1])
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: next(answers)))
    scheduler.add(request("a", 4))
    turn(scheduler)
    with pytest.raises(PluginError, match=r"decode_steps\(\)"):
        scheduler.schedule(0.0)
    step = plan(scheduler)
    assert work(step) == [1]
    assert [sequence for sequence, _ in step.blocks] == [1]


def test_an_impossible_displacement() -> None:
    scheduler = make_scheduler(policy(preempts=lambda candidate, running: candidate), max_running=1)
    scheduler.add(request("a"))
    turn(scheduler)
    scheduler.add(request("b"))
    with pytest.raises(PluginError, match=r"preempts\(\)"):
        scheduler.schedule(0.0)
    scheduler.check()


def test_who_is_left_out_waits_unless_nothing_else_runs() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [view for view in waiting if view.id != "a"]))
    scheduler.add(request("a", max_tokens=1))
    scheduler.add(request("b", max_tokens=2))
    assert [output.request for output in finish(scheduler)] == ["b", "b", "a"]


def test_one_named_twice_is_admitted_once() -> None:
    scheduler = make_scheduler(policy(order=lambda waiting, now: [*waiting, *waiting]))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert [piece.sequence for piece in plan(scheduler).chunks] == [1, 2]


def test_no_share_for_anybody_still_gives_progress() -> None:
    scheduler = make_scheduler(policy(split=lambda budget, waiting, running: Split(decode=0, prefill=-1)))
    for name in "ab":
        scheduler.add(request(name, max_tokens=2))
    assert len(finish(scheduler)) == 4


def test_views_show_what_is_planned_and_cannot_be_changed() -> None:
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


def test_the_waiting_are_shown_in_order_of_arrival() -> None:
    seen: list[list[str]] = []
    scheduler = make_scheduler(
        policy(order=lambda waiting, now: seen.append([view.id for view in waiting]) or waiting), max_running=1
    )
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("d", 2.0)):
        scheduler.add(request(name, arrival=arrival))
    plan(scheduler)
    assert seen == [["b", "d", "a", "c"]]
