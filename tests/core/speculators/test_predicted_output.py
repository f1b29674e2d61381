"""PredictedOutput: follows the output in its prediction, and finds the place again after each difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from engine.core.errors import InvalidRequestError
from engine.core.speculators import PredictedOutput, check_prediction
from engine.core.tokens import Tokens

FILE = list(range(10, 60))


def replay(prediction: Sequence[int], output: Sequence[int], limit: int = 4) -> list[int]:
    """The positions of the output before which a step begins, where each takes what is right of a proposal."""
    one, made, starts = PredictedOutput(Tokens(prediction)), list[int](), []
    while len(made) < len(output):
        starts.append(len(made))
        proposal = list(one.propose(made, limit)) if made else []
        assert one.proposed == bool(proposal)
        right = 0
        while right < min(len(proposal), len(output) - len(made)) and proposal[right] == output[len(made) + right]:
            right += 1
        made += output[len(made) : len(made) + right + 1]
    return starts


def test_an_output_that_is_predicted_takes_the_fewest_steps() -> None:
    assert replay(FILE, FILE) == [0, *range(1, len(FILE), 5)]


def test_a_longer_output_goes_on_without_proposals() -> None:
    assert PredictedOutput(Tokens(FILE)).propose(FILE, 4) == ()
    assert replay(FILE[:6], [*FILE[:6], 1, 2, 3]) == [0, 1, 6, 7, 8]


@pytest.mark.parametrize(
    ("output", "found_at"),
    [
        ([*FILE[:20], 1, *FILE[20:]], 23),
        ([*FILE[:20], 1, 2, 3, *FILE[20:]], 25),
        ([*FILE[:20], *FILE[25:]], 22),
        ([*FILE[:20], 1, *FILE[21:]], 23),
        ([7, 8, *FILE], 4),
        ([*FILE[30:], *FILE[:30]], 2),
    ],
    ids=["inserted", "inserted more", "left out", "replaced", "before the beginning", "moved"],
)
def test_the_place_is_found_again_two_tokens_after_a_difference(output: list[int], found_at: int) -> None:
    one = PredictedOutput(Tokens(FILE))
    proposals = {at: one.propose(output[:at], 3) for at in range(1, len(output) + 1)}
    assert list(proposals[found_at]) == output[found_at : found_at + 3]
    assert len(replay(FILE, output)) <= len(replay(FILE, FILE)) + 7


def test_of_several_places_the_one_that_agrees_in_most_tokens_is_followed() -> None:
    prediction = [1, 5, 6, 30, 31, 9, 5, 6, 40, 41, 3, 2, 5, 6, 50, 51]
    assert list(PredictedOutput(Tokens(prediction)).propose([8, 2, 5, 6], 2)) == [50, 51]
    assert list(PredictedOutput(Tokens(prediction)).propose([8, 8, 5, 6], 2)) == [30, 31]


def test_of_equal_places_the_next_one_ahead_is_followed() -> None:
    prediction = [20, 5, 6, 30, 21, 22, 23, 5, 6, 31, 24, 25]
    one = PredictedOutput(Tokens(prediction))
    assert list(one.propose([20, 5, 6, 30, 21, 22], 1)) == [23]
    assert list(one.propose([20, 5, 6, 30, 21, 22, 9, 5, 6], 1)) == [31]


def test_asking_again_for_equal_tokens_changes_nothing() -> None:
    one = PredictedOutput(Tokens(FILE))
    assert [list(one.propose(FILE[:7], 2)) for _ in range(3)] == [FILE[7:9]] * 3
    assert [list(one.propose([*FILE[:7], 1], 2)) for _ in range(3)] == [[]] * 3


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5)
)
def test_a_proposal_is_a_part_of_the_prediction(prediction: list[int], output: list[int], limit: int) -> None:
    one = PredictedOutput(Tokens(prediction))
    for at in range(1, len(output) + 1):
        found = list(one.propose(output[:at], limit))
        assert len(found) <= limit
        assert any(prediction[start : start + len(found)] == found for start in range(len(prediction) + 1))


class Counting(list[int]):
    """Counts how often an element is read."""

    reads = 0

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(index)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("length", [100, 3000])
def test_the_work_per_token_does_not_depend_on_the_length(length: int) -> None:
    one, output = PredictedOutput(Tokens([1, 2] * length)), Counting()
    for token in [3, 1, 2, 1] * 50:
        output.append(token)
        one.propose(output, 4)
    assert output.reads <= 200 * 200


def test_a_prediction_without_a_speculator_is_refused() -> None:
    check_prediction(speculates=True)
    with pytest.raises(InvalidRequestError, match=r"choose a speculator \(--speculator auto\), or leave") as caught:
        check_prediction(speculates=False)
    assert caught.value.parameter == "prediction"
