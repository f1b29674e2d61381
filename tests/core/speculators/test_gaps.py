"""The time for which the device is idle before a step with drafts."""

from __future__ import annotations

import pytest

from engine.core.speculators.gaps import Gaps


def test_the_gap_is_the_mean_and_a_long_one_changes_little() -> None:
    gaps = Gaps()
    assert gaps.expected(4) == 0
    for gap in (3.0, 1.0, 2.0):
        gaps.observe(gap, 4)
    assert gaps.expected(4) == pytest.approx(2.0)
    for _ in range(60):
        gaps.observe(2.0, 4)
    gaps.observe(1000.0, 4)
    assert gaps.expected(4) < 2.2


def test_the_gap_is_that_of_the_nearest_number_of_sequences() -> None:
    gaps = Gaps()
    gaps.observe(1.0, 1)
    gaps.observe(9.0, 64)
    assert [gaps.expected(count) for count in (1, 3, 48, 400)] == [1.0, 1.0, 9.0, 9.0]
