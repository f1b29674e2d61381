"""The scheduler with a speculator: which requests have drafts, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from engine.core.errors import ExecutorError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.grammars.compiler import Grammars
from engine.core.grammars.grammar import Grammar
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import SchedulingPolicy, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators import CheckedSpeculator, SpeculatedSequence, Speculator, SpeculatorSpec
from engine.core.types import NO_TOKEN, Output, Step, StepResult, TokenLogprobs

from .scheduling import BLOCK_SIZE, EOS, Policy, finish, plan, policy, request, turn, views


class Scripted(Speculator):
    """Proposes what a function returns, and records which drafts were accepted and which requests finished."""

    api = "1"

    def __init__(self, answer: Callable[[SpeculatedSequence, int], Sequence[int]], max_drafts: int) -> None:
        super().__init__(SpeculatorSpec(vocab_size=10**6, max_len=1000, max_drafts=max_drafts))
        self.answer = answer
        self.limits: list[int] = []
        self.told: list[Any] = []

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        self.limits.append(limit)
        return self.answer(sequence, limit)

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        self.told.append((request_id, verified, accepted))

    def finished(self, request_id: str) -> None:
        self.told.append(request_id)


def many(sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
    """As many drafts as may be: 100, 101 and so on."""
    return range(100, 100 + limit)


def nothing(sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
    return ()


def make(
    answer: Callable[[SpeculatedSequence, int], Sequence[int]] = many,
    chosen: SchedulingPolicy | None = None,
    *,
    max_drafts: int = 3,
    num_blocks: int = 100,
    grammars: Any = None,
    **limits: int,
) -> tuple[Scheduler, Scripted]:
    speculator = Scripted(answer, max_drafts)
    scheduler = Scheduler(
        chosen or Policy(),
        BlockManager(num_blocks, BLOCK_SIZE),
        eos_tokens=frozenset({EOS}),
        speculator=CheckedSpeculator(speculator, speculator.spec),
        grammars=grammars,
        **{"max_batch_tokens": 64, "max_running": 8, "max_len": 1000, **limits},
    )
    return scheduler, speculator


def verify(scheduler: Scheduler, step: Step, *verified: tuple[int, ...], **fields: Any) -> list[Output]:
    """Commit a step with the tokens of its draft slices; all others sample 7."""
    row = (7,) * (len(step.decodes) + sum(chunk.sample for chunk in step.chunks))
    outputs = scheduler.commit(step, StepResult(step=step.id, tokens=(row,), verified=verified, **fields), 0.0)
    scheduler.check()
    return outputs


def drafts(step: Step) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(part.sequence, part.start, part.tokens) for part in step.drafts]


def test_drafts_follow_the_last_token_and_accepted_ones_are_output() -> None:
    scheduler, speculator = make()
    scheduler.add(request("a", 3))
    turn(scheduler)
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (7, 100, 101, 102))]
    assert not step.decodes
    [output] = verify(scheduler, step, (100, 101, 50))
    assert output.tokens == (100, 101, 50)
    assert speculator.told == [("a", 3, 2)]
    [view] = views(scheduler)
    assert (view.computed_tokens, view.output_tokens) == (6, 4)
    step = plan(scheduler)
    assert drafts(step) == [(1, 6, (50, 100, 101, 102))]
    assert not step.positions


def test_requests_without_a_proposal_decode_as_always() -> None:
    asked: list[tuple[str, list[int], int, str | None]] = []

    def only_b(sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        asked.append((sequence.request_id, list(sequence.tokens), sequence.prompt_length, sequence.tenant))
        return [9] if sequence.request_id == "b" and len(sequence.tokens) < 4 else ()

    scheduler, _ = make(only_b)
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "")):
        scheduler.add(request(name, [1, 2], salt=salt))
    turn(scheduler)
    step = plan(scheduler)
    assert (step.decodes, drafts(step)) == ((1, 3), [(2, 2, (7, 9))])
    assert asked[:2] == [("a", [1, 2, 7], 2, None), ("b", [1, 2, 7], 2, "tenant")]
    verify(scheduler, step, (9, 8))
    step = plan(scheduler)
    assert (step.decodes, step.drafts, step.positions) == ((1, 2, 3), (), ((2, 4),))
    turned = step.decodes
    verify(scheduler, step)
    assert plan(scheduler).decodes is turned


def test_a_stop_token_among_accepted_drafts_ends_the_output() -> None:
    scheduler, speculator = make(lambda sequence, limit: [5, EOS, 6])
    scheduler.add(request("a"))
    turn(scheduler)
    [output] = verify(scheduler, plan(scheduler), (5, EOS, 6, 8))
    assert (output.tokens, output.finish_reason, output.stop_token, output.num_tokens) == ((5, EOS), "stop", EOS, 3)
    assert speculator.told == [("a", 3, 3), "a"]
    assert scheduler.stats().blocks_used == 0


def test_limit_leaves_room_for_the_token_after_the_drafts() -> None:
    scheduler, speculator = make(max_drafts=8)
    scheduler.add(request("a", max_tokens=4))
    turn(scheduler)
    step = plan(scheduler)
    assert speculator.limits == [2]
    [output] = verify(scheduler, step, (100, 101, 5))
    assert (output.tokens, output.finish_reason) == ((100, 101, 5), "length")


def test_last_token_is_decoded_without_drafts() -> None:
    scheduler, speculator = make()
    scheduler.add(request("a", max_tokens=2))
    turn(scheduler)
    step = plan(scheduler)
    assert (step.decodes, step.drafts, speculator.limits) == ((1,), (), [])


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2},
        {"grammar": Grammar.regex("a+")},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_request_has_drafts_where_the_next_token_depends_on_more_than_its_logits(fields: dict[str, Any]) -> None:
    scheduler, _ = make()
    scheduler.add(request("a", **fields))
    turn(scheduler)
    assert drafts(plan(scheduler)) == [(1, 3, (7, 100, 101, 102))]


class Forcing(GrammarMatcher):
    """Allows 100 and 101, and forces what comes between 50 and 60."""

    is_terminated = False
    last = 0

    def fill_mask(self, mask: Any) -> None:
        raise AssertionError("a proposal needs no mask")

    def accept(self, token: int) -> bool:
        self.last = token
        return True

    def rollback(self, count: int) -> None:
        raise AssertionError("nothing was accepted but the output")

    def count_allowed(self, tokens: Sequence[int]) -> int:
        return sum(token in (100, 101) for token in tokens)

    def forced_tokens(self) -> Sequence[int]:
        return range(self.last + 1, 60) if self.last in range(50, 60) else ()


class Compiled(CompiledGrammar, Grammars):
    """A grammar, and what compiles it."""

    def __init__(self) -> None:
        self.owner = "grammar 'forcing' of engine-forcing 0.4"

    def matcher(self) -> GrammarMatcher:
        return Forcing()

    def begin(self, grammar: Grammar) -> Future[CompiledGrammar]:
        future = Future[CompiledGrammar]()
        future.set_result(self)
        return future


def test_the_speculator_learns_of_its_own_drafts_alone() -> None:
    scheduler, speculator = make(grammars=Compiled())
    scheduler.add(request("a", 3, grammar=Grammar.regex("a")))
    turn(scheduler)
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (7, 100, 101))]
    verify(scheduler, step, (100, 57))
    assert speculator.told == [("a", 2, 1)]
    speculator.answer = nothing
    step = plan(scheduler)
    assert drafts(step) == [(1, 5, (57, 58, 59))]
    verify(scheduler, step, (58, 59, 1))
    assert speculator.told == [("a", 2, 1)]
    assert scheduler.stats().speculation is not None
    assert scheduler._drafting is not None
    assert scheduler._drafting._requests
    scheduler.abort("a")
    assert not scheduler._drafting._requests


def test_forced_drafts_do_not_count_as_predicted() -> None:
    scheduler, _ = make(nothing, grammars=Compiled())
    scheduler.add(request("a", 3, grammar=Grammar.regex("a"), prediction=(7, 100, 101, 57, 70, 71)))
    turn(scheduler)
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (7, 100, 101))]
    [output] = verify(scheduler, step, (100, 101, 57))
    assert output.prediction_tokens == (2, 0)
    step = plan(scheduler)
    assert drafts(step) == [(1, 6, (57, 58, 59))]
    [output] = verify(scheduler, step, (58, 5))
    assert output.prediction_tokens == (2, 0)


def test_drafts_take_what_prompts_leave_of_the_budget() -> None:
    scheduler, _ = make(max_batch_tokens=10, max_drafts=5)
    for name in "ab":
        scheduler.add(request(name, 2))
    turn(scheduler)
    scheduler.add(request("c", 4))
    step = plan(scheduler)
    assert [chunk.count for chunk in step.chunks] == [4]
    assert (step.decodes, drafts(step)) == ((2,), [(1, 2, (7, 100, 101, 102, 103))])


def test_drafts_take_what_the_policy_leaves_to_decodes() -> None:
    scheduler, _ = make(many, policy(split=lambda *_: Split(decode=3, prefill=64)), max_drafts=5)
    for name in "ab":
        scheduler.add(request(name, 2))
    turn(scheduler)
    step = plan(scheduler)
    assert (step.decodes, drafts(step)) == ((2,), [(1, 2, (7, 100))])


def test_a_step_with_drafts_has_one_iteration() -> None:
    scheduler, _ = make(many, policy(decode_steps=lambda *_: 4))
    scheduler.add(request("a"))
    turn(scheduler)
    step = plan(scheduler)
    assert (bool(step.drafts), step.iterations) == (True, 1)


def test_blocks_of_rejected_drafts_are_given_back() -> None:
    scheduler, _ = make(max_drafts=8)
    scheduler.add(request("a", 3))
    turn(scheduler)
    step = plan(scheduler)
    assert step.blocks == ((1, (1, 2)),)
    assert scheduler.stats().blocks_used == 3
    verify(scheduler, step, (5,))
    assert scheduler.stats().blocks_used == 2
    step = plan(scheduler)
    assert step.blocks == ((1, (-2, 2, 3)),)
    verify(scheduler, step, (100, 101, 102, 5))
    assert scheduler.stats().blocks_used == 3


def test_drafts_preempt_no_one_when_blocks_are_short() -> None:
    scheduler, _ = make(num_blocks=3, max_len=8, max_drafts=3)
    for name in "ab":
        scheduler.add(request(name, 2, max_tokens=5))
    turn(scheduler)
    step = plan(scheduler)
    assert drafts(step) == [(1, 2, (7, 100, 101, 102)), (2, 2, (7, 100))]
    assert step.blocks == ((1, (2,)),)
    assert scheduler.stats().preemptions == 0


def test_only_verified_tokens_are_found_in_the_prefix_cache() -> None:
    scheduler, _ = make(max_drafts=8)
    scheduler.add(request("a", [1, 2, 3], max_tokens=10))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 5))  # 1 2 3 7 | 100 5, and rejected drafts up to the third block
    wrong, right = [1, 2, 3, 7, 100, 101, 102, 103, 1], [1, 2, 3, 7, 100, 5, 6, 7, 1]
    for name, prompt in (("b", wrong), ("c", right)):
        scheduler.add(request(name, prompt, max_tokens=1))
    step = plan(scheduler)
    assert [chunk.start for chunk in step.chunks] == [4, 4]


def test_accepted_drafts_count_of_a_request_that_is_preempted_in_the_next_step() -> None:
    scheduler, _ = make(many, policy(preempts=lambda candidate, running: running[0] if candidate.priority else None))
    scheduler.add(request("a", 3, max_tokens=9))
    turn(scheduler)
    step = plan(scheduler)
    for number in range(8):
        scheduler.add(request(f"b{number}", 3, priority=int(number == 7), arrival=float(number)))
    [output] = verify(scheduler, step, (100, 101, 5))
    assert output.tokens == (100, 101, 5)
    later = plan(scheduler)
    assert (later.finished, later.positions) == ((1,), ())
    outputs = verify(scheduler, later) + finish_with_drafts(scheduler)
    assert sum(len(output.tokens) for output in outputs if output.request == "a") == 9 - 4


def finish_with_drafts(scheduler: Scheduler) -> list[Output]:
    """Run steps in which no draft is accepted until request a has finished."""
    outputs: list[Output] = []
    while not any(output.request == "a" and output.finish_reason for output in outputs):
        step = plan(scheduler)
        outputs += verify(scheduler, step, *[(5,)] * len(step.drafts))
    return outputs


def test_a_request_aborted_while_its_drafts_are_verified_is_gone() -> None:
    scheduler, speculator = make()
    scheduler.add(request("a"))
    turn(scheduler)
    step = plan(scheduler)
    assert scheduler.abort("a") is not None
    assert verify(scheduler, step, (100, 101, 102, 5)) == []
    assert speculator.told == ["a"]
    assert not scheduler.has_work


def test_logprobs_belong_to_the_accepted_tokens() -> None:
    scheduler, _ = make()
    for name in "ab":
        scheduler.add(request(name))
    turn(scheduler)
    entries = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in (100, 5))
    a, b = verify(scheduler, plan(scheduler), (100, 5), (5,), verified_logprobs=(entries, ()))
    assert (a.logprobs, b.logprobs) == (entries, ())


def test_logits_that_are_not_finite_after_a_draft_end_the_request() -> None:
    scheduler, _ = make()
    scheduler.add(request("a"))
    turn(scheduler)
    [output] = verify(scheduler, plan(scheduler), (100, NO_TOKEN))
    assert (output.tokens, output.finish_reason) == ((100,), "error")


@pytest.mark.parametrize("verified", [(), ((),), ((100, 5), (5,)), ((5, 100),), ((100, 101, 102, 5, 6),)], ids=str)
def test_a_result_that_does_not_fit_the_drafts_is_the_executors_fault(verified: tuple[tuple[int, ...], ...]) -> None:
    scheduler, _ = make()
    scheduler.add(request("a"))
    turn(scheduler)
    with pytest.raises(ExecutorError, match="drafts accepted in each of 1 slices"):
        verify(scheduler, plan(scheduler), *verified)


def test_result_is_needed_for_a_step_with_drafts_and_for_a_proposal() -> None:
    scheduler, speculator = make(nothing)
    scheduler.add(request("a"))
    assert not scheduler.needs_result()
    step = plan(scheduler)
    assert not scheduler.needs_result()
    verify(scheduler, step)
    step = plan(scheduler)
    assert not scheduler.needs_result()
    speculator.answer = many
    assert scheduler.needs_result()
    verify(scheduler, step)
    assert not scheduler.needs_result()
    step = plan(scheduler)
    speculator.answer = nothing
    assert step.drafts
    assert scheduler.needs_result()


def test_no_step_is_planned_while_one_with_drafts_is_in_flight() -> None:
    scheduler, speculator = make(lambda sequence, limit: [9] if sequence.request_id == "a" else ())
    for name in "ab":
        scheduler.add(request(name))
    turn(scheduler)
    first = plan(scheduler)
    assert (first.decodes, drafts(first)) == ((2,), [(1, 3, (7, 9))])
    scheduler.add(request("c"))
    assert scheduler.needs_result()
    assert scheduler.schedule(0.0) is None
    verify(scheduler, first, (9, 8))
    speculator.answer = nothing
    second = plan(scheduler)
    assert (second.decodes, second.positions, len(second.chunks)) == ((1, 2), ((1, 5),), 1)


def test_stats_count_drafts_by_position_and_faults() -> None:
    scheduler, speculator = make(max_drafts=3)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 101, 5), (5,))
    speculator.answer = lambda sequence, limit: [-1]
    turn(scheduler)
    stats = scheduler.stats().speculation
    assert stats is not None
    assert (stats.verified, stats.accepted, stats.faults) == ((2, 2, 2), (1, 1, 0), 2)


def test_no_stats_without_a_speculator() -> None:
    scheduler = Scheduler(
        Policy(), BlockManager(8, 4), max_batch_tokens=8, max_running=2, max_len=8, eos_tokens=frozenset()
    )
    assert scheduler.stats().speculation is None
    assert not scheduler.speculates
    scheduler.add(request("a", max_tokens=2))
    finish(scheduler)
