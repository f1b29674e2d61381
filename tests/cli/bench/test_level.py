"""Levels of load: statistics of answers."""

from __future__ import annotations

import pytest

from engine.cli.bench.client import Answered
from engine.cli.bench.level import Level, Spread, percentile, within

ANSWERS = (
    Answered(sent=0.0, events=(0.1, 0.2, 0.4), tokens=3),
    Answered(sent=0.5, events=(0.8, 0.9), tokens=2),
    Answered(sent=0.6, error="status 503"),
)
LEVEL = Level(name="concurrency 2", answers=ANSWERS, seconds=2.0, input_len=10, cores=1.5, load_cores=0.1, good=1)


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1.0, 2.0, 4.0], part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    spread = Spread.of([0.003, 0.001])
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((2.0, 2.0, 2.8, 2.98))
    assert Spread.of([]) == Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)


def test_a_level_counts_what_was_served() -> None:
    assert LEVEL.output_rate == 5 / 2
    assert LEVEL.total_rate == 25 / 2
    assert LEVEL.request_rate == 1.0
    assert LEVEL.errors == {"status 503": 1}
    assert LEVEL.ttft.mean == pytest.approx(200)
    assert LEVEL.tpot.mean == pytest.approx((150 + 100) / 2)
    assert LEVEL.itl.mean == pytest.approx((100 + 200 + 100) / 3)
    rows = {row.metric: row.value for row in LEVEL.rows()}
    assert rows["goodput"] == 0.5
    assert rows["errors"] == 1
    assert rows["CPU cores of the server"] == 1.5


def test_objectives_hold_for_both_times() -> None:
    first = ANSWERS[0]
    assert within(first, 100.1, 150.1)
    assert not within(first, 99.0, None)
    assert not within(first, None, 149.0)
    assert within(Answered(sent=0.0, events=(0.1,), tokens=1), 200, 1)
