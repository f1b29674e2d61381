"""CPU time by phase, by a clock that the test moves."""

from __future__ import annotations

from array import array

import pytest

from engine.server.front_end.phase_times import MeasuredPhaseTimes, PhaseTimes
from engine.server.shared.metrics_table import FRONT_END_PHASES


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cells() -> memoryview[float]:
    return memoryview(array("d", [0.0] * len(FRONT_END_PHASES)))


def seconds(cells: memoryview[float]) -> dict[str, float]:
    return {phase: value for phase, value in zip(FRONT_END_PHASES, cells, strict=True) if value}


def test_a_phase_has_the_time_of_its_functions_and_http_the_rest(clock: Clock, cells: memoryview[float]) -> None:
    phases = MeasuredPhaseTimes(cells, clock)
    clock.spend(1)
    phases.timed("route", clock.spend)(2)
    clock.spend(4)
    phases.update()
    assert seconds(cells) == {"http": 5, "route": 2}


def test_a_phase_within_another_is_not_counted_twice(clock: Clock, cells: memoryview[float]) -> None:
    phases = MeasuredPhaseTimes(cells, clock)

    def deliver() -> None:
        clock.spend(1)
        phases.timed("detokenize", clock.spend)(2)
        clock.spend(4)

    phases.timed("deliver", deliver)()
    assert seconds(cells) == {"deliver": 5, "detokenize": 2}


def test_a_function_that_raises_ends_its_phase(clock: Clock, cells: memoryview[float]) -> None:
    phases = MeasuredPhaseTimes(cells, clock)

    def fail() -> None:
        clock.spend(1)
        raise KeyError

    with pytest.raises(KeyError):
        phases.timed("write", fail)()
    clock.spend(2)
    phases.update()
    assert seconds(cells) == {"http": 2, "write": 1}


def test_the_time_of_a_thread_is_added_when_the_event_loop_updates(clock: Clock, cells: memoryview[float]) -> None:
    phases = MeasuredPhaseTimes(cells, lambda: 0.0)
    phases._clock = clock
    phases.timed_in_thread("tokenize", lambda: clock.spend(3))()
    assert seconds(cells) == {}
    phases._clock = lambda: 0.0
    phases.update()
    assert seconds(cells) == {"tokenize": 3}


def test_functions_stay_as_they_are_when_nothing_is_measured() -> None:
    phases = PhaseTimes()
    assert phases.timed("route", len) is len
    assert phases.timed_in_thread("route", list) is list
