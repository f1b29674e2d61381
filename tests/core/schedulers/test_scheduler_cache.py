"""The prefix cache in the scheduler, and prompt logprobs, which cannot use the cache."""

from __future__ import annotations

from engine.core.types import StepResult, TokenLogprobs

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
    work,
)

# Prefix cache


def test_cached_prefix_is_not_recomputed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 10, max_tokens=1))
    turn(scheduler)
    scheduler.add(request("b", hash_tokens("a", 12), max_tokens=2))
    step = plan(scheduler)
    assert work(step) == [(2, 8, 4, True)]
    assert [(sequence, len(blocks)) for sequence, blocks in step.blocks] == [(2, 3)]
    assert len(step.new[0].tokens) == 12
    assert commit(scheduler, step)[0].cached_tokens == 8


def test_reset_prefix_cache_leaves_no_prefix_to_later_requests() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 10, max_tokens=1))
    turn(scheduler)
    scheduler.add(request("running", 10, max_tokens=9))
    turn(scheduler)
    cached = scheduler.stats().blocks_cached
    assert cached == 2
    assert scheduler.reset_prefix_cache() == cached
    assert scheduler.stats().blocks_cached == 0
    for name in ("a", "running"):
        scheduler.add(request(f"like {name}", hash_tokens(name, 12), max_tokens=1))
    outputs = turn(scheduler)
    assert [output.cached_tokens for output in outputs] == [0, 0, 0]
    finish(scheduler)  # "running" goes on with its own blocks
    scheduler.add(request("again", hash_tokens("running", 12), max_tokens=1))
    assert turn(scheduler)[0].cached_tokens == 8, "what was computed after the reset is cached"
    scheduler.check()


def test_fully_cached_prompt_recomputes_its_last_block() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(request(name, range(100, 108), max_tokens=1))
        step = plan(scheduler)
        commit(scheduler, step)
    assert work(step) == [(2, 4, 4, True)]


def test_output_is_cached() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 1, 1], max_tokens=6))
    finish(scheduler)
    scheduler.add(request("b", [1, 1, 1, 7, 7, 7, 7, 7, 5], max_tokens=1))
    assert turn(scheduler)[0].cached_tokens == 8


def test_blocks_are_shared_once_their_step_is_planned() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 8, max_tokens=9))
    first = plan(scheduler)
    scheduler.add(request("b", hash_tokens("a", 9), max_tokens=1))
    second = plan(scheduler)
    assert work(second) == [1, (2, 8, 1, True)], "steps run in the order planned"
    commit(scheduler, first)
    assert commit(scheduler, second)[1].cached_tokens == 8


def test_block_is_shared_only_when_its_last_token_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 7, max_tokens=9))
    turn(scheduler)
    assert len(scheduler._queues.running) == 1
    assert len(scheduler._blocks._by_digest) == 1, "the eighth token is known, but not in the cache"
    turn(scheduler)
    assert len(scheduler._blocks._by_digest) == 2


def test_requests_of_different_salts_share_no_prefix() -> None:
    scheduler = make_scheduler()
    for name, salt, cached in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8)):
        scheduler.add(request(name, range(100, 110), max_tokens=1, salt=salt))
        assert turn(scheduler)[0].cached_tokens == cached


def logprobs_of(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in tokens)


def test_prompt_logprobs_are_gathered_over_chunks_without_the_cache() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    scheduler.add(request("a", [1, 2, 3, 4, 5, 6], max_tokens=1))
    while scheduler.has_work:
        turn(scheduler)
    scheduler.add(request("b", [1, 2, 3, 4, 5, 6], max_tokens=2, prompt_logprobs=0, logprobs=0))
    step = plan(scheduler)
    assert work(step) == [(2, 0, 4, False)]
    result = StepResult(step=step.id, tokens=((),), prompt_logprobs=((2, logprobs_of(2, 3, 4, 5)),))
    assert scheduler.commit(step, result, 0.0) == []
    step = plan(scheduler)
    result = StepResult(
        step=step.id, tokens=((7,),), logprobs=(logprobs_of(7),), prompt_logprobs=((2, logprobs_of(6)),)
    )
    (output,) = scheduler.commit(step, result, 0.0)
    assert output.prompt_logprobs == logprobs_of(2, 3, 4, 5, 6)
    assert output.logprobs == logprobs_of(7)
    assert scheduler.stats().prefix_queries == 6, "only the first request's prompt was looked up"
    (output,) = turn(scheduler)
    assert output.prompt_logprobs is None
    assert output.logprobs == ()


def test_logprobs_end_with_the_tokens() -> None:
    scheduler = make_scheduler(policy(decode_steps=lambda running, waiting: 3))
    scheduler.add(request("a", max_tokens=9, logprobs=0))
    scheduler.add(request("b", max_tokens=9))
    turn(scheduler)
    step = plan(scheduler)
    logprobs = tuple((entry, None) for entry in logprobs_of(5, EOS, 6))
    result = StepResult(step=step.id, tokens=((5, 5), (EOS, 6), (6, 7)), logprobs=logprobs)
    first, second = scheduler.commit(step, result, 0.0)
    assert first.logprobs == logprobs_of(5, EOS)
    assert second.logprobs == ()
