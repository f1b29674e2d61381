"""Requests with a predicted output: what is proposed from it, what is counted, and what the speculator learns."""

from __future__ import annotations

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.types import FINISH_LENGTH, FINISH_STOP

from .scheduling import EOS, make_scheduler, plan, request, turn
from .test_scheduler_drafts import drafts, make, nothing, verify


def test_a_prediction_comes_before_the_speculator() -> None:
    scheduler, speculator = make()
    scheduler.add(request("a", 3, prediction=(7, 8, 9, 10, 11, 12)))
    scheduler.add(request("b", 3))
    [first, other] = turn(scheduler)
    assert (first.prediction_tokens, other.prediction_tokens) == ((0, 0), None)
    step = plan(scheduler)
    assert [tokens for _, _, tokens in drafts(step)] == [(7, 8, 9, 10), (7, 100, 101, 102)]
    [output, other] = verify(scheduler, step, (8, 9, 50), (100, 5))
    assert (output.prediction_tokens, other.prediction_tokens) == ((2, 1), None)
    assert speculator.told == [("b", 3, 1)]
    assert speculator.limits == [3]


def test_the_speculator_is_asked_where_the_output_is_not_in_the_prediction() -> None:
    scheduler, speculator = make()
    scheduler.add(request("a", 3, prediction=(1, 12, 13, 14, 15)))
    turn(scheduler)
    [output] = verify(scheduler, plan(scheduler), (100, 12))
    assert output.prediction_tokens == (0, 0)
    verify(scheduler, plan(scheduler), (13,))
    assert speculator.told == [("a", 3, 1), ("a", 3, 0)]
    step = plan(scheduler)
    assert drafts(step) == [(1, 6, (13, 14, 15))]
    [output] = verify(scheduler, step, (14, 15, 6))
    assert output.prediction_tokens == (2, 0)
    assert len(speculator.told) == 2


def test_accepted_tokens_after_a_stop_count_as_rejected() -> None:
    scheduler, _ = make(nothing)
    scheduler.add(request("a", 3, prediction=(7, 8, EOS, 9)))
    turn(scheduler)
    [output] = verify(scheduler, plan(scheduler), (8, EOS, 9, 10))
    assert (output.tokens, output.finish_reason, output.prediction_tokens) == ((8, EOS), FINISH_STOP, (2, 1))


def test_the_last_output_has_the_counts_of_all_steps() -> None:
    scheduler, _ = make(nothing, max_drafts=2)
    scheduler.add(request("a", 3, prediction=range_of(7, 30), max_tokens=7))
    turn(scheduler)
    verify(scheduler, plan(scheduler), (8, 9, 10))
    [output] = verify(scheduler, plan(scheduler), (11, 12, 13))
    assert (output.finish_reason, output.prediction_tokens) == (FINISH_LENGTH, (4, 0))
    assert scheduler.stats().blocks_used == 0


def range_of(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last))


def test_a_prediction_is_forgotten_when_its_request_ends() -> None:
    scheduler, _ = make(nothing)
    scheduler.add(request("a", 3, prediction=range_of(7, 60)))
    turn(scheduler)
    assert scheduler._drafting is not None
    assert drafts(plan(scheduler))
    assert scheduler._drafting._requests
    scheduler.abort("a")
    assert not scheduler._drafting._requests


def test_a_prediction_is_refused_where_nothing_can_follow_it() -> None:
    with pytest.raises(InvalidRequestError, match="--speculator auto"):
        make_scheduler().add(request("a", prediction=(1, 2)))
    scheduler, _ = make()
    with pytest.raises(InvalidRequestError, match="a prediction of 1001 tokens exceeds 1000 tokens"):
        scheduler.add(request("a", prediction=(1,) * 1001))
    assert not scheduler.has_work
