from __future__ import annotations

import pytest

from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import Request, SamplingParams

PAGE = 4


@pytest.fixture
def clock() -> StepCounter:
    return StepCounter()


@pytest.fixture
def decoding(clock: StepCounter) -> DecodeSet:
    return DecodeSet(clock)


def sequence(
    clock: StepCounter, number: int, *, prompt: int = 3, capacity: int = PAGE, max_output: int = 100
) -> RequestState:
    """A sequence with its prompt computed, which has sampled one token."""
    state = RequestState(
        Request(id=str(number), prompt=(1,) * prompt),
        SamplingParams(seed=0),
        max_output=max_output,
        stop_tokens=frozenset(),
        block_size=PAGE,
        number=number,
        clock=clock,
    )
    state.admit(number, 0, capacity)
    assert state.book_chunk(prompt)
    return state


def test_members_gain_a_token_a_tick(clock: StepCounter, decoding: DecodeSet) -> None:
    early, late = sequence(clock, 1), sequence(clock, 2)
    decoding.join(early)
    decoding.advance(1)
    decoding.join(late)
    assert (early.computed, early.sampled, late.computed, late.sampled) == (4, 2, 3, 1)
    decoding.leave(early)
    late.capacity += PAGE
    decoding.file(late)
    decoding.advance(3)
    assert (early.computed, early.sampled, late.computed, late.sampled) == (4, 2, 6, 4)


def test_members_are_the_same_objects_while_nothing_changes(clock: StepCounter, decoding: DecodeSet) -> None:
    first, second = sequence(clock, 1), sequence(clock, 2)
    decoding.join(first)
    decoding.join(second)
    before = decoding.members()
    assert before == ((1, 2), (first, second))
    assert all(now is old for now, old in zip(decoding.members(), before, strict=True))
    decoding.limit(1)
    decoding.limit(2)
    assert all(now is old for now, old in zip(decoding.members(), before, strict=True)), "the same again"
    decoding.leave(first)
    assert decoding.members() == ((2,), (second,))


@pytest.mark.parametrize(
    ("capacity", "max_output", "tick"), [(4, 100, 1), (8, 100, 5), (3, 100, 0), (8, 3, 2), (8, 1, 0)]
)
def test_due_when_blocks_or_outputs_are_used_up(
    clock: StepCounter, decoding: DecodeSet, capacity: int, max_output: int, tick: int
) -> None:
    state = sequence(clock, 1, capacity=capacity, max_output=max_output)
    decoding.join(state)
    assert [number for number in range(10) if decoding.due(number)] == [tick]
    decoding.advance(tick)
    assert state.computed == capacity or state.sampled == max_output


def test_who_is_due_comes_oldest_first_and_only_once(clock: StepCounter, decoding: DecodeSet) -> None:
    states = [sequence(clock, number) for number in (3, 1, 2)]
    for state in states:
        decoding.join(state)
    assert [state.sequence for state in decoding.due(1)] == [1, 2, 3]
    decoding.leave(states[1])
    states[2].capacity += PAGE
    decoding.file(states[2])
    assert [state.sequence for state in decoding.due(1)] == [3]
    assert [state.sequence for state in decoding.due(5)] == [2]


def test_the_oldest_held_come_back_first(clock: StepCounter, decoding: DecodeSet) -> None:
    for number in (1, 2, 3, 4):
        decoding.join(sequence(clock, number, capacity=40))
    decoding.limit(0)
    assert (len(decoding), decoding.due(1)) == (0, [])
    decoding.advance(1)
    decoding.limit(2)
    assert decoding.members()[0] == (1, 2)
    decoding.limit(64)
    assert decoding.members()[0] == (1, 2, 3, 4)


def test_in_flight_is_known_after_the_clock_has_stopped(clock: StepCounter, decoding: DecodeSet) -> None:
    state = sequence(clock, 1)
    decoding.join(state)
    decoding.leave(state)
    assert not state.in_flight, "it has had no part in any step"
    decoding.join(state)
    clock.planned += 1
    decoding.advance(1)
    assert state.in_flight
    decoding.leave(state)
    clock.planned += 1
    assert state.in_flight
    clock.committed += 1
    assert not state.in_flight
