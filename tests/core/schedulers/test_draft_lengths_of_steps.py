"""The scheduler with a speculator whose drafts are as many as pay."""

from __future__ import annotations

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators import CheckedSpeculator, DraftLengths, StepCosts
from engine.core.types import Step, StepResult

from .scheduling import BLOCK_SIZE, EOS, Policy, plan, request, turn
from .test_scheduler_drafts import Scripted, many

FREE = [(1, 100.0), (100, 101.0)]
DEAR = [(1, 1.0), (100, 100.0)]


def make(measured: list[tuple[int, float]], max_drafts: int = 4) -> tuple[Scheduler, Scripted, DraftLengths]:
    speculator = Scripted(many, max_drafts)
    lengths = DraftLengths(StepCosts(measured), max_drafts)
    scheduler = Scheduler(
        Policy(),
        BlockManager(100, BLOCK_SIZE),
        eos_tokens=frozenset({EOS}),
        speculator=CheckedSpeculator(speculator, speculator.spec),
        draft_lengths=lengths,
        max_batch_tokens=64,
        max_running=8,
        max_len=1000,
    )
    return scheduler, speculator, lengths


def verify(scheduler: Scheduler, step: Step, accepted: int) -> None:
    """Commit a step in which each slice has this many drafts accepted, and every other sequence gets token 7."""
    columns = len(step.decodes) + sum(chunk.sample for chunk in step.chunks)
    verified = tuple((*part.tokens[1 : accepted + 1], 50) for part in step.drafts)
    scheduler.commit(step, StepResult(step=step.id, tokens=((7,) * columns,), verified=verified), 0.0)


def test_drafts_that_are_accepted_get_more_and_rejected_ones_fewer() -> None:
    for accepted, final in ((4, 4), (0, 0)):
        scheduler, _, _ = make([(1, 100.0), (100, 500.0)])
        scheduler.add(request("a", max_tokens=300))
        turn(scheduler)
        counts = []
        for _ in range(40):
            step = plan(scheduler)
            counts.append(sum(len(part.tokens) - 1 for part in step.drafts))
            verify(scheduler, step, min(accepted, counts[-1]))
        assert counts[-1] == final
        assert 0 < counts[0] < 4


def test_a_speculator_is_not_asked_where_drafts_cannot_pay() -> None:
    scheduler, speculator, _ = make(DEAR)
    for name in "abc":
        scheduler.add(request(name, max_tokens=100))
    turn(scheduler)
    for _ in range(10):
        step = plan(scheduler)
        assert not step.drafts
        assert not scheduler.needs_result()
        verify(scheduler, step, 0)
    assert speculator.limits == []


def test_the_result_is_waited_for_only_where_a_proposal_may_pay() -> None:
    for measured, waits in ((FREE, True), (DEAR, False)):
        scheduler, _, _ = make(measured)
        scheduler.add(request("a", max_tokens=100))
        turn(scheduler)
        step = plan(scheduler)
        assert bool(step.drafts) == waits
        assert scheduler.needs_result() == waits


def test_an_idle_step_begins_anew_when_the_step_before_was_planned_without_waiting() -> None:
    scheduler, _, lengths = make(DEAR)
    calls: list[str] = []
    begin, revise = lengths.begin, lengths.revise

    def begins(rows: int, tokens: int) -> bool:
        calls.append("begin")
        return begin(rows, tokens)

    def revises(rows: int, tokens: int) -> None:
        calls.append("revise")
        revise(rows, tokens)

    lengths.begin, lengths.revise = begins, revises  # type: ignore[method-assign]
    scheduler.add(request("a", max_tokens=100))
    turn(scheduler)
    first = plan(scheduler)
    assert not scheduler.needs_result()
    second = plan(scheduler)
    for step in (first, second):
        verify(scheduler, step, 0)
    calls.clear()
    plan(scheduler)
    assert calls == ["begin"]


def test_a_finished_request_is_forgotten() -> None:
    scheduler, _, lengths = make(FREE)
    scheduler.add(request("a", max_tokens=100))
    turn(scheduler)
    verify(scheduler, plan(scheduler), 0)
    assert list(lengths._requests) == ["a"]
    scheduler.abort("a")
    assert not lengths._requests
