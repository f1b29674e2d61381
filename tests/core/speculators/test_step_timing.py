"""Steps of a running engine correct the times that were measured at start."""

from __future__ import annotations

import pytest

from engine.core.speculators import DraftLengths, StepCosts, StepTiming
from engine.core.speculators.gaps import Gaps
from engine.core.types import DraftSlice, PrefillChunk, Step


class NotedGaps(Gaps):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, int]] = []

    def observe(self, time: float, sequences: int) -> None:
        self.seen.append((time, sequences))


class Noted(DraftLengths):
    def __init__(self) -> None:
        super().__init__(StepCosts([(1, 1.0), (8, 1.0)]), 4)
        self.seen: list[tuple[int, float, bool]] = []
        self.gaps: NotedGaps = NotedGaps()

    def observe(self, rows: int, time: float, *, drafts: bool) -> None:
        self.seen.append((rows, time, drafts))


def plain(decodes: int = 2, **fields: int) -> Step:
    return Step(id=1, decodes=tuple(range(decodes)), chunks=(), **fields)


def with_drafts(*, chunks: tuple[PrefillChunk, ...] = ()) -> Step:
    return Step(id=1, decodes=(5,), chunks=chunks, drafts=(DraftSlice(1, 3, (7, 8, 9)), DraftSlice(2, 3, (7, 8))))


def timing(times: list[float], *, overlaps: bool = False) -> tuple[StepTiming, Noted]:
    lengths, clock = Noted(), iter(times)
    return StepTiming(lengths, overlaps=overlaps, clock=lambda: next(clock)), lengths


def test_a_step_takes_the_time_from_its_submission_to_its_result_and_that_of_the_host_before() -> None:
    timed, lengths = timing([10.0, 12.0, 13.0, 16.0, 25.0, 29.0])
    for step in (plain(), with_drafts(), plain(3)):
        timed.begin()
        timed.end(step)
        timed.learn()
    assert lengths.seen == [(2, 2.0, False), (6, 4.0, True), (3, 6.0, False)], "the engine was idle before the last one"


def test_a_step_that_overlaps_takes_the_time_between_results() -> None:
    timed, lengths = timing([0.0, 1.0, 5.0, 6.0, 9.0], overlaps=True)
    timed.begin()
    timed.begin()
    timed.end(plain())
    timed.begin()
    timed.end(plain(3))
    timed.learn()
    assert lengths.seen == [(3, 4.0, False)]


def test_iterations_share_the_time_and_steps_with_prompts_do_not_count() -> None:
    timed, lengths = timing([0.0, 8.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    steps = (
        plain(iterations=4),
        Step(id=1, decodes=(1,), chunks=(PrefillChunk(2, 0, 5, False),)),
        with_drafts(chunks=(PrefillChunk(2, 0, 5, False),)),
        Step(id=1, decodes=(), chunks=(PrefillChunk(2, 0, 5, False),)),
    )
    for step in steps:
        timed.begin()
        timed.end(step)
        timed.learn()
    assert lengths.seen == [(2, 2.0, False)]


def test_steps_that_waited_for_a_result_teach_the_gap_before_drafts_but_not_the_time_without_drafts() -> None:
    times = [0.0, 5.0, 7.0, 10.0, 11.0, 15.0]
    for overlaps, gaps in ((True, [(2.0, 3)]), (False, [])):
        timed, lengths = timing(times, overlaps=overlaps)
        for step in (plain(), with_drafts(), plain()):
            timed.begin()
            timed.end(step)
            timed.learn()
        assert lengths.gaps.seen == gaps
        assert lengths.seen == ([(6, 3.0, True)] if overlaps else [(2, 5.0, False), (6, 4.5, True), (2, 5.0, False)])


def test_steps_in_flight_are_forgotten() -> None:
    timed, lengths = timing([0.0, 10.0, 11.0])
    timed.begin()
    timed.forget()
    timed.begin()
    timed.end(plain())
    timed.learn()
    assert lengths.seen == [(2, 1.0, False)]


def test_times_are_learned_when_the_caller_says_so_and_once() -> None:
    timed, lengths = timing([0.0, 10.0])
    timed.begin()
    timed.end(plain())
    assert lengths.seen == []
    timed.learn()
    timed.learn()
    assert lengths.seen == [(2, 10.0, False)]


def test_observed_steps_correct_the_times_of_their_rows_and_at_first_of_all() -> None:
    costs = StepCosts([(1, 10.0), (10, 20.0), (100, 110.0)])
    for _ in range(200):
        costs.observe(10, 40.0)
    assert costs.table(100)[10] == pytest.approx(40, rel=0.05)
    assert costs.table(100)[100] == pytest.approx(220, rel=0.05)
    for _ in range(400):
        costs.observe(100, 110.0)
    assert costs.table(100)[100] == pytest.approx(110, rel=0.05)
    assert costs.table(100)[10] == pytest.approx(40, rel=0.05)


def test_a_few_steps_correct_times_that_were_measured_wrong() -> None:
    costs = StepCosts([(1, 10.0), (10, 20.0)])
    for _ in range(16):
        costs.observe(10, 10.0)
    assert costs.table(10)[10] == pytest.approx(10, rel=0.15)


def test_one_step_that_was_disturbed_changes_little() -> None:
    costs = StepCosts([(1, 10.0), (10, 20.0)])
    for _ in range(40):
        costs.observe(10, 20.0)
    for _ in range(8):
        costs.observe(10, 20.0 if _ else 1e6)
    assert costs.table(10)[10] < 22


def test_times_that_were_measured_wrong_are_corrected_by_probes() -> None:
    """At start, drafts seemed to take ten times as long as they do; probes correct that."""
    plain_costs = StepCosts([(1, 1.0), (64, 1.1)])
    lengths = DraftLengths(StepCosts([(1, 10.0), (64, 11.0)]), 4, plain=plain_costs)
    drafts = []
    for _ in range(6000):
        lengths.begin(1, 1)
        count = sum(lengths.choose([("r", lengths.limits(["r"])[0])]))
        drafts.append(count)
        if count:
            lengths.probed(1 + count, 1.05)
            lengths.record([("r", count, count)])
        lengths.observe(1 + count, 1.05, drafts=count > 0)
    assert drafts[0] == 0
    assert drafts[-1] == 4
