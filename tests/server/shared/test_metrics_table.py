from __future__ import annotations

from array import array

from engine.core.types import HistogramCounts
from engine.server.shared.metrics_table import Histogram


def test_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0), memoryview(array("d", [0.0] * 4)))
    histogram.observe(0.5)
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0)
    assert histogram.snapshot() == HistogramCounts((2, 3, 1), 0.5 + 1.0 + 4.5 + 9.0)
