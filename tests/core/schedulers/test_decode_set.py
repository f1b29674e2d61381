from __future__ import annotations

import pytest

from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import Request, SamplingParams

BLOCK_SIZE = 4


@pytest.fixture
def counter() -> StepCounter:
    return StepCounter()


@pytest.fixture
def decoding(counter: StepCounter) -> DecodeSet:
    return DecodeSet(counter)


def sequence(
    counter: StepCounter, number: int, *, prompt: int = 3, capacity: int = BLOCK_SIZE, max_output: int = 100
) -> RequestState:
    """A sequence whose prompt is computed and which has sampled one token."""
    state = RequestState(
        Request(id=str(number), prompt=(1,) * prompt),
        SamplingParams(seed=0),
        max_output=max_output,
        stop_tokens=frozenset(),
        block_size=BLOCK_SIZE,
        chain=HashChain(BLOCK_SIZE),
        number=number,
        counter=counter,
    )
    state.admit(number, capacity)
    assert state.plan_chunk(0, prompt)
    return state


def test_members_gain_a_token_per_iteration(counter: StepCounter, decoding: DecodeSet) -> None:
    early, late = sequence(counter, 1), sequence(counter, 2)
    decoding.add(early)
    decoding.advance(1)
    decoding.add(late)
    assert (early.computed, early.sampled, late.computed, late.sampled) == (4, 2, 3, 1)
    decoding.remove(early)
    late.capacity += BLOCK_SIZE
    decoding.schedule_event(late)
    decoding.advance(3)
    assert (early.computed, early.sampled, late.computed, late.sampled) == (4, 2, 6, 4)


def test_members_returns_the_same_objects_while_nothing_changes(counter: StepCounter, decoding: DecodeSet) -> None:
    first, second = sequence(counter, 1), sequence(counter, 2)
    decoding.add(first)
    decoding.add(second)
    before = decoding.members()
    assert before == ((1, 2), (first, second))
    assert all(now is old for now, old in zip(decoding.members(), before, strict=True))
    decoding.limit(1)
    decoding.limit(2)
    assert all(now is old for now, old in zip(decoding.members(), before, strict=True)), "same members again"
    decoding.remove(first)
    assert decoding.members() == ((2,), (second,))


def test_members_excluding_some_are_the_same_objects_as_before_if_they_are_equal(
    counter: StepCounter, decoding: DecodeSet
) -> None:
    first, second = sequence(counter, 1), sequence(counter, 2)
    decoding.add(first)
    decoding.add(second)
    all_members = decoding.members()
    before = decoding.members(excluding={1})
    assert before == ((2,), (second,))
    assert all(now is old for now, old in zip(decoding.members(excluding={1}), before, strict=True))
    assert decoding.members() == all_members


def test_accepted_drafts_are_tokens_beyond_those_of_iterations(counter: StepCounter, decoding: DecodeSet) -> None:
    drafted, other = (sequence(counter, number, capacity=12) for number in (1, 2))
    decoding.add(drafted)
    decoding.add(other)
    decoding.advance(1)
    decoding.accept_drafts([(drafted, 3)])
    assert (drafted.computed, drafted.sampled, other.computed, other.sampled) == (7, 5, 4, 2)
    assert [number for number in range(12) if drafted in decoding.events_at(number)] == [6]
    assert [number for number in range(12) if other in decoding.events_at(number)] == [9]
    decoding.check({1: drafted, 2: other})


@pytest.mark.parametrize(
    ("capacity", "max_output", "iteration"), [(4, 100, 1), (8, 100, 5), (3, 100, 0), (8, 3, 2), (8, 1, 0)]
)
def test_next_event_is_when_blocks_or_output_are_used_up(
    counter: StepCounter, decoding: DecodeSet, capacity: int, max_output: int, iteration: int
) -> None:
    state = sequence(counter, 1, capacity=capacity, max_output=max_output)
    decoding.add(state)
    assert [number for number in range(10) if decoding.events_at(number)] == [iteration]
    decoding.advance(iteration)
    assert state.computed == capacity or state.sampled == max_output


def test_events_at_returns_each_sequence_once_oldest_first(counter: StepCounter, decoding: DecodeSet) -> None:
    states = [sequence(counter, number) for number in (3, 1, 2)]
    for state in states:
        decoding.add(state)
    assert [state.sequence for state in decoding.events_at(1)] == [1, 2, 3]
    decoding.remove(states[1])
    states[2].capacity += BLOCK_SIZE
    decoding.schedule_event(states[2])
    assert [state.sequence for state in decoding.events_at(1)] == [3]
    assert [state.sequence for state in decoding.events_at(5)] == [2]


def test_limit_reactivates_the_oldest_deferred_sequences_first(counter: StepCounter, decoding: DecodeSet) -> None:
    for number in (1, 2, 3, 4):
        decoding.add(sequence(counter, number, capacity=40))
    decoding.limit(0)
    assert (len(decoding), decoding.events_at(1)) == (0, [])
    decoding.advance(1)
    decoding.limit(2)
    assert decoding.members()[0] == (1, 2)
    decoding.limit(64)
    assert decoding.members()[0] == (1, 2, 3, 4)


def test_in_flight_is_known_after_decoding_has_stopped(counter: StepCounter, decoding: DecodeSet) -> None:
    state = sequence(counter, 1)
    decoding.add(state)
    decoding.remove(state)
    assert not state.in_flight, "no step included the sequence"
    decoding.add(state)
    counter.steps_planned += 1
    decoding.advance(1)
    assert state.in_flight
    decoding.remove(state)
    counter.steps_planned += 1
    assert state.in_flight
    counter.steps_committed += 1
    assert not state.in_flight


def test_events_at_returns_a_sequence_once_that_was_removed_and_added_again(
    counter: StepCounter, decoding: DecodeSet
) -> None:
    state = sequence(counter, 1)
    decoding.add(state)
    decoding.remove(state)
    decoding.add(state)
    assert decoding.events_at(1) == [state]
