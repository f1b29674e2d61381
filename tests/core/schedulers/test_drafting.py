"""How sequences advance by drafts: blocks, next events, positions, and what the device proposes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.grammars.grammar import Grammar
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators import DeviceProposals, SpeculatedSequence, SpeculatorSpec
from engine.core.types import FINISH_LENGTH, Step, StepResult

from .scheduling import BLOCK_SIZE, EOS, Policy, finish, plan, policy, request, turn, views
from .test_scheduler_drafts import Compiled, drafts, make, many, nothing, verify


def only(*names: str, count: int = 1) -> object:
    """Proposes `count` tokens for these requests."""

    def propose(sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        return range(100, 100 + min(count, limit)) if sequence.request_id in names else ()

    return propose


@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("prompt", range(1, 2 * BLOCK_SIZE + 1))
def test_a_sequence_keeps_the_slot_of_its_next_token_at_any_distance_from_the_end_of_a_block(
    prompt: int, accepted: int
) -> None:
    scheduler, speculator = make()
    scheduler.add(request("a", prompt, max_tokens=30))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (*range(100, 100 + accepted), 5))
    [view] = views(scheduler)
    assert view.computed_tokens == prompt + 1 + accepted
    held = scheduler.stats().blocks_used
    assert view.computed_tokens <= held * BLOCK_SIZE < view.computed_tokens + 1 + BLOCK_SIZE
    speculator.answer = nothing
    step = plan(scheduler)
    assert (step.decodes, step.positions) == ((1,), ((1, view.computed_tokens - 1),))
    verify(scheduler, step)
    outputs = finish(scheduler)
    assert sum(len(output.tokens) for output in outputs) == 30 - 3 - accepted
    assert scheduler.stats().preemptions == 0


def test_accepted_drafts_bring_the_end_of_the_output_nearer() -> None:
    """The last token is planned, so the sequence takes part in no step that is planned behind it."""
    scheduler, speculator = make()
    for name, max_tokens in (("a", 5), ("b", 30)):
        scheduler.add(request(name, max_tokens=max_tokens))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 101, 5), (5,))
    speculator.answer = nothing
    first = plan(scheduler)
    second = plan(scheduler)
    assert (first.decodes, second.decodes) == ((1, 2), (2,))
    done, _ = verify(scheduler, first)
    assert (done.finish_reason, done.num_tokens) == (FINISH_LENGTH, 5)


def test_a_sequence_goes_on_without_drafts_in_its_place_of_the_batch() -> None:
    scheduler, speculator = make(only("b"))
    for name in "abc":
        scheduler.add(request(name))
    turn(scheduler)
    step = plan(scheduler)
    assert (step.decodes, [part.sequence for part in step.drafts]) == ((1, 3), [2])
    verify(scheduler, step, (100, 5))
    again = plan(scheduler)
    assert again.decodes is step.decodes
    assert not again.positions
    verify(scheduler, again, (5,))
    speculator.answer = nothing
    step = plan(scheduler)
    assert (step.decodes, step.positions) == ((1, 2, 3), ((2, 6),))
    verify(scheduler, step)
    step = plan(scheduler)
    assert (step.decodes, step.positions) == ((1, 2, 3), ())


def test_the_position_of_a_sequence_is_sent_when_the_policy_defers_it_after_its_drafts() -> None:
    decodes = 8
    scheduler, speculator = make(many, policy(split=lambda *_: Split(decode=decodes, prefill=64)))
    for name in "ab":
        scheduler.add(request(name))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 5), (100, 101, 5))
    decodes, speculator.answer = 1, nothing
    step = plan(scheduler)
    assert (step.decodes, step.positions) == ((1,), ((1, 5), (2, 6)))
    verify(scheduler, step)
    decodes, speculator.answer = 8, many
    assert drafts(plan(scheduler)) == [(1, 6, (7, 100, 101, 102)), (2, 6, (5, 100, 101, 102))]


def test_no_position_is_sent_of_a_sequence_that_is_aborted_after_its_drafts() -> None:
    scheduler, speculator = make()
    for name in "ab":
        scheduler.add(request(name))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 5), (5,))
    scheduler.abort("a")
    speculator.answer = nothing
    step = plan(scheduler)
    assert (step.finished, step.decodes, step.positions) == ((1,), (2,), ((2, 4),))


def test_an_aborted_request_leaves_the_others_of_its_step_their_drafts() -> None:
    scheduler, speculator = make()
    for name in "abc":
        scheduler.add(request(name))
    turn(scheduler)
    step = plan(scheduler)
    scheduler.abort("b")
    outputs = verify(scheduler, step, (100, 5), (100, 101, 102, 5), (5,))
    assert [(output.request, output.tokens) for output in outputs] == [("a", (100, 5)), ("c", (5,))]
    assert [view.computed_tokens for view in views(scheduler)] == [5, 4]
    assert speculator.told == ["b", ("a", 3, 1), ("c", 3, 0)]


def test_a_step_of_several_iterations_may_follow_one_with_drafts() -> None:
    scheduler, speculator = make(many, policy(decode_steps=lambda *_: 4))
    scheduler.add(request("a", 3, max_tokens=30))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (100, 5))
    speculator.answer = nothing
    step = plan(scheduler)
    assert (step.iterations, step.positions) == (4, ((1, 5),))
    scheduler.commit(step, StepResult(step=step.id, tokens=((7,),) * 4), 0.0)
    scheduler.check()
    [view] = views(scheduler)
    assert (view.computed_tokens, view.output_tokens) == (9, 7)


def test_a_sequence_is_preempted_for_the_block_that_another_needs_after_its_drafts() -> None:
    scheduler, speculator = make(only("a", count=3), num_blocks=4, max_len=16)
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=10))
    turn(scheduler)
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (7, 100, 101, 102))]
    verify(scheduler, step, (100, 101, 102, 5))
    speculator.answer = nothing
    while not scheduler.stats().preemptions:
        turn(scheduler)
    assert [view.id for view in views(scheduler)] == ["a"]
    outputs = finish(scheduler)
    assert {output.request for output in outputs if output.finish_reason} == {"a", "b"}


def test_accepted_drafts_that_fill_several_blocks_are_found_in_the_prefix_cache() -> None:
    scheduler, _ = make(max_drafts=8)
    scheduler.add(request("a", [1, 2, 3], max_tokens=30))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (*range(100, 108), 5))  # 1 2 3 7 | 100 to 103 | 104 to 107 | 5
    scheduler.add(request("b", [1, 2, 3, 7, *range(100, 108), 5, 6], max_tokens=1))
    [chunk] = plan(scheduler).chunks
    assert chunk.start == 12


def test_drafts_of_a_grammar_stand_next_to_those_of_the_speculator() -> None:
    scheduler, speculator = make(only("b", count=3), grammars=Compiled())
    scheduler.add(request("a", 3, grammar=Grammar.regex("a")))
    scheduler.add(request("b", 3))
    turn(scheduler, 57, 7)
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (57, 58, 59)), (2, 3, (7, 100, 101, 102))]
    verify(scheduler, step, (58, 59, 1), (100, EOS))
    assert speculator.told == [("b", 3, 1), "b"]
    assert [view.computed_tokens for view in views(scheduler)] == [6]


def on_device(max_drafts: int = 2, num_blocks: int = 100) -> Scheduler:
    return Scheduler(
        Policy(),
        BlockManager(num_blocks, BLOCK_SIZE),
        eos_tokens=frozenset({EOS}),
        speculator=DeviceProposals(SpeculatorSpec(vocab_size=1000, max_len=100, max_drafts=max_drafts)),
        max_batch_tokens=64,
        max_running=8,
        max_len=100,
    )


def propose(scheduler: Scheduler, step: Step, *proposals: tuple[int, ...]) -> None:
    """Commit a step with these proposals; each slice has its first draft accepted, and every other sequence gets 7."""
    row = (7,) * (len(step.decodes) + sum(chunk.sample for chunk in step.chunks))
    verified = tuple((part.tokens[1], 5) for part in step.drafts)
    result = StepResult(step=step.id, tokens=(row,), verified=verified, proposals=proposals)
    scheduler.commit(step, result, 0.0)
    scheduler.check()


def test_proposals_of_the_device_are_verified_by_the_next_step_only() -> None:
    scheduler = on_device()
    for name in "ab":
        scheduler.add(request(name))
    propose(scheduler, plan(scheduler), (10, 11), (20,))
    step = plan(scheduler)
    assert drafts(step) == [(1, 3, (7, 10, 11)), (2, 3, (7, 20))]
    propose(scheduler, step, (), (21, 22))
    step = plan(scheduler)
    assert (step.decodes, drafts(step)) == ((1,), [(2, 5, (5, 21, 22))])
    propose(scheduler, step)
    step = plan(scheduler)
    assert (step.decodes, step.drafts) == ((1, 2), ())


def test_proposals_for_a_request_that_has_ended_are_not_those_of_another_of_its_name() -> None:
    scheduler = on_device()
    scheduler.add(request("a"))
    step = plan(scheduler)
    scheduler.abort("a")
    scheduler.add(request("a"))
    propose(scheduler, step, (10, 11))
    propose(scheduler, plan(scheduler), (12,))
    assert drafts(plan(scheduler)) == [(2, 3, (7, 12))]
