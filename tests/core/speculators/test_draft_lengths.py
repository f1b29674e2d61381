"""How many drafts are verified: never slower than plain decoding in a simulation, near the best fixed number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.core.errors import ConfigError
from engine.core.speculators import DraftLengths, StepCosts
from tests.core.speculators.simulation import CURVES, Acceptance, Simulation, costs_of

STEPS = 250


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_speculation_is_never_slower_than_plain_decoding(curve: str, batch: int) -> None:
    for acceptance in (0.0, 0.5, 0.7, 0.9):
        assert Simulation(curve, batch, acceptance).run(STEPS) >= 0.98


@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.7), (8, 0.5), (8, 0.9), (64, 0.7)])
@pytest.mark.parametrize("curve", ["memory, then compute", "CUDA graphs of 8, 16, ... rows"])
def test_speculation_is_about_as_fast_as_with_the_best_fixed_number(curve: str, batch: int, acceptance: float) -> None:
    best = max(Simulation(curve, batch, acceptance, fixed=fixed).run(100) for fixed in range(6))
    assert Simulation(curve, batch, acceptance).run(STEPS) >= 0.94 * best


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("curve", ["memory, then compute", "CUDA graphs of 8, 16, ... rows"])
def test_numbers_of_rows_whose_first_step_takes_long_are_used_all_the_same(curve: str, batch: int) -> None:
    """As the first step of a CUDA graph may."""
    gap = 0.1 * CURVES[curve](batch)
    expected, found = Simulation(curve, batch, 0.8, gap=gap), Simulation(curve, batch, 0.8, gap=gap, first_use=10)
    expected.run(1500), found.run(1500)
    assert found.run(1500) > 0.97 * expected.run(1500)


def test_requests_that_differ_are_served_better_than_by_any_fixed_number() -> None:
    mixed: Acceptance = (0.0, 0.9)
    best = max(Simulation("memory, then compute", 64, mixed, fixed=fixed).run(100) for fixed in range(6))
    assert Simulation("memory, then compute", 64, mixed).run(STEPS) > 1.1 * best


@pytest.mark.parametrize("batch", [1, 8])
def test_speculation_goes_off_and_on_again_with_the_acceptance(batch: int) -> None:
    curve = "a laptop" if batch == 1 else "memory, then compute"
    simulation = Simulation(curve, batch, lambda step: 0.9 * (step < 200 or step >= 900))
    first, _, none, _, again = (simulation.run(steps) for steps in (200, 100, 600, 400, 200))
    assert none >= 0.98
    assert again >= 0.9 * first > 1.3


def test_a_large_batch_that_is_bound_by_compute_turns_speculation_off_and_a_small_one_on() -> None:
    lengths = DraftLengths(costs_of("memory, then compute"), 5)
    for _ in range(30):
        lengths.record([("r", 5, 3)])
    lengths.begin(4, 4)
    assert lengths.limits(["r"])[0] == 5
    asked = 0
    for _ in range(16):
        lengths.begin(400, 400)
        asked += sum(lengths.choose([("r", lengths.limits(["r"])[0])]))
    assert asked == 1, "once, to try it"
    lengths.begin(4, 4)
    assert lengths.limits(["r"])[0] == 5


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_time_for_which_the_device_waits_for_the_host_counts(curve: str, batch: int) -> None:
    for acceptance in (0.0, 0.3, 0.5, 0.7, 0.9):
        assert Simulation(curve, batch, acceptance, gap=0.2 * CURVES[curve](batch)).run(STEPS) >= 0.98


def test_one_rejected_draft_at_the_start_ends_no_speculation() -> None:
    drafts = StepCosts([(1, 4.41), (2, 4.81), (4, 4.87), (8, 4.87)])  # ms, of Llama-8B on an H200
    lengths = DraftLengths(drafts, 3, plain=StepCosts([(1, 4.0), (8, 4.4)]), overlaps=True)
    lengths.gaps.observe(0.54, 1)
    lengths.record([("first", 3, 0)])
    assert lengths.begin(1, 1)
    assert lengths.limits(["second"])[0] > 0
    assert lengths.choose([("second", 3)]) != [0]


def test_drafts_that_gain_more_than_the_gap_costs_are_verified() -> None:
    assert Simulation("memory, then compute", 8, 0.9, gap=1000).run(STEPS) > 2


def test_the_host_does_not_wait_where_drafts_do_not_pay() -> None:
    lengths = DraftLengths(costs_of("bound by compute"), 5, overlaps=True)
    for _ in range(40):
        lengths.record([("r", 5, 2)])
    waits = 0
    for _ in range(200):
        if lengths.begin(8, 8) and lengths.pays([("r", 5)]):
            waits += 1
            lengths.record([("r", sum(lengths.choose([("r", 5)])), 0)])
    assert 1 <= waits <= 5, "for probes, less and less often"


def test_waiting_ends_when_no_proposal_is_left_each_time() -> None:
    """Each time, nothing is left of the proposal once the newest token is known."""
    lengths = DraftLengths(costs_of("memory, then compute"), 5, overlaps=True)
    lengths.gaps.observe(2000.0, 1)
    for _ in range(40):
        lengths.record([("r", 5, 5)])
    waits = [lengths.begin(1, 1) and lengths.pays([("r", 5)]) for _ in range(400)]
    assert waits[0]
    assert sum(waits) * 2000 <= 2000 + 0.005 * 400 * 5206


def test_requests_are_not_asked_for_a_while_after_proposals_that_did_not_pay() -> None:
    lengths = DraftLengths(costs_of("bound by compute"), 5)
    lengths.record([("r", 5, 5)])
    asked = [lengths.begin(64, 64) and lengths.choose([("r", 1)]) is not None for _ in range(64)]
    assert sum(asked) < 10


def test_a_probe_takes_along_the_requests_that_cost_no_more() -> None:
    lengths = DraftLengths(StepCosts([(8, 10.0), (16, 11.0), (24, 12.0)], padded=True), 2)
    for number in range(12 * 40):
        lengths.record([(str(number % 12), 20, 0)])
    for _ in range(200):
        if lengths.begin(12, 12) and any(counts := lengths.choose([(str(number), 1) for number in range(12)])):
            break
    assert counts == [1] * 4 + [0] * 8


def test_steps_without_drafts_may_have_other_times() -> None:
    """As those of CUDA graphs, next to steps with drafts, which are launched kernel by kernel."""
    graphs, eager = StepCosts([(1, 100.0), (64, 110.0)]), StepCosts([(1, 300.0), (64, 310.0)])
    lengths = DraftLengths(eager, 4, plain=graphs)
    for _ in range(40):
        lengths.record([("seldom", 4, 0)])
        lengths.record([("sure", 4, 4)])
    lengths.begin(1, 1)
    assert lengths.choose([("sure", 4)]) == [4]
    lengths.begin(1, 1)
    assert lengths.limits(["seldom"])[0] == 0


def test_the_most_probable_drafts_of_all_sequences_are_chosen() -> None:
    lengths = DraftLengths(StepCosts([(1, 10.0), (2, 10.0), (9, 10.0), (10, 1000.0)], padded=True), 4)
    for _ in range(40):
        lengths.record([("sure", 4, 4)])
        lengths.record([("unsure", 4, 0)])
    lengths.begin(3, 3)
    assert lengths.choose([("sure", 4), ("unsure", 4), ("sure", 1)]) == [4, 1, 1]
    assert lengths.choose([("sure", 2), ("unsure", 0)]) == [2, 0]
    assert lengths.choose([]) == []


@pytest.mark.parametrize(
    ("rows", "proposals"), [(3, [("a", 4), ("b", 3)]), (3, [("a", 4), ("b", 2)]), (5, [("a", 4), ("b", 3)]), (3, [])]
)
def test_a_choice_that_was_prepared_is_the_one_that_is_made_without(
    rows: int, proposals: list[tuple[str, int]]
) -> None:
    made = []
    for prepares in (True, False):
        lengths = DraftLengths(StepCosts([(1, 10.0), (4, 11.0), (6, 14.0), (16, 40.0)]), 4)
        for request, accepted in (("a", 30), ("b", 15)):
            lengths.record([(request, 32, accepted)])
        lengths.begin(3, 3)
        assert any(lengths.choose([("a", 4), ("b", 3)]))
        if prepares:
            lengths.prepare()
        made.append((lengths.begin(rows, rows), lengths.limits(["a", "b"]), lengths.choose(proposals)))
    assert made[0] == made[1]


def noted(calls: list[str], name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(name)
        return work(*arguments)

    return call


def test_a_prepared_choice_is_used_once_and_takes_no_time_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = DraftLengths(costs_of("bound by memory"), 4)
    proposals = [("a", 4)]
    lengths.begin(1, 1)
    lengths.choose(proposals)
    lengths.prepare()
    calls: list[str] = []
    for name in ("_count", "_most_per_time"):
        monkeypatch.setattr(lengths, name, noted(calls, name, getattr(lengths, name)))
    for _ in range(2):
        lengths.begin(1, 1)
        assert lengths.choose(proposals) == [4]
    assert calls == ["_count", "_most_per_time"], "in the second step only"


def test_what_was_prepared_holds_for_one_step_also_if_that_has_no_proposals() -> None:
    costs, plain = (StepCosts([(1, 10.0), (16, 11.0)]) for _ in range(2))
    lengths = DraftLengths(costs, 4, plain=plain)
    lengths.begin(1, 1)
    assert any(lengths.choose([("a", 4)]))
    lengths.prepare()
    lengths.begin(1, 1)
    for _ in range(400):
        for rows in (2, 3, 4, 5):
            costs.observe(rows, 100.0)
    lengths.begin(1, 1)
    assert lengths.limits(["a"])[0] == 0
    assert lengths.choose([("a", 4)]) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_that_of_a_search_through_all_choices(seed: int) -> None:
    pick = np.random.default_rng(seed)
    times = np.cumsum(pick.choice([0.0, 1.0, 3.0], 20)) + 20
    lengths = DraftLengths(StepCosts([(rows + 1, time) for rows, time in enumerate(times)]), 3)
    requests = ["a", "b", "c"]
    for request in requests:
        lengths.record([(request, 40, int(pick.integers(0, 40)))])
    lengths.begin(3, 3)
    proposals = [(request, int(pick.integers(1, 4))) for request in requests]

    def rate(counts: tuple[int, ...]) -> float:
        gains = sum(
            sum(acceptance ** (number + 1) for number in range(count))
            for acceptance, count in zip(lengths.acceptances(requests), counts, strict=True)
        )
        return (3 + gains) / float(times[2 + sum(counts)])

    choices = list(itertools.product(*(range(length + 1) for _, length in proposals)))
    best = max(map(rate, choices))
    found = rate(tuple(lengths.choose(proposals)))
    assert found == pytest.approx(best) or best < 1.01 * rate((0, 0, 0))


def test_a_step_in_which_nothing_can_pay_asks_no_request() -> None:
    lengths = DraftLengths(costs_of("bound by compute"), 5)
    assert not lengths.begin(64, 64)
    assert not lengths.begin(64, 0)


def test_limits_are_the_drafts_whose_probability_is_enough() -> None:
    lengths = DraftLengths(StepCosts([(1, 10.0), (2, 13.0), (16, 55.0)]), 5)
    requests = [str(number) for number in range(9)]
    for number, request in enumerate(requests):
        lengths.record([(request, 8, number)] * 20)
    lengths.begin(4, 4)
    needed = lengths._least
    assert 0 < needed < 1
    expected = [sum(one**count >= needed for count in range(1, 6)) for one in lengths.acceptances(requests)]
    assert lengths.limits(requests)[1:] == expected[1:]
    assert expected[0] < expected[-1]


def test_drafts_recorded_together_count_as_those_recorded_one_after_the_other() -> None:
    together, apart = (DraftLengths(costs_of("a laptop"), 5) for _ in range(2))
    outcomes = [("a", 5, 3), ("b", 2, 2), ("a", 4, 0), ("c", 1, 1)]
    together.record(outcomes)
    for outcome in outcomes:
        apart.record([outcome])
    names = ["a", "b", "c", "new"]
    assert together.acceptances(names) == apart.acceptances(names)


def test_a_finished_request_leaves_nothing() -> None:
    lengths = DraftLengths(costs_of("a laptop"), 5)
    lengths.begin(1, 1)
    lengths.limits(["r"])[0]
    lengths.record([("r", 2, 0)])
    lengths.finished("r")
    lengths.finished("never seen")
    assert lengths._requests == {}


def test_costs_are_interpolated_or_padded_and_never_fall() -> None:
    measured = [(4, 20.0), (1, 10.0), (8, 18.0), (4, 30.0), (16, 40.0)]
    assert StepCosts(measured).table(20)[:21:2].tolist() == pytest.approx(
        [10, 10 + 10 / 3, 20, 20, 20, 25, 30, 35, 40, 45, 50]
    )
    assert StepCosts(measured, padded=True).table(18)[[1, 2, 4, 5, 8, 9, 16, 18]].tolist() == pytest.approx(
        [10, 20, 20, 20, 20, 40, 40, 45]
    )


@pytest.mark.parametrize("measured", [[], [(1, 5.0)], [(1, 5.0), (1, 6.0)], [(0, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)]])
def test_costs_need_two_numbers_of_rows_and_positive_times(measured: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError, match="two or more numbers of rows"):
        StepCosts(measured)
