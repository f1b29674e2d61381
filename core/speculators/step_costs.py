"""The time of a step by the number of its rows, from measurements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.core.errors import ConfigError
from engine.core.speculators.recent_median import RecentMedian

_SLOW, _BEFORE = 0.02, 1
"""Weight of an observation after the first ones; and how many observations the measurements stand for until then."""
_REFRESH = 8
"""Observations after which the table is computed again."""
_FEW = 4
"""Observations of a number of rows below which the common factor is used in place of its own."""


class StepCosts:
    """Measured times of steps, linear beyond the last measurement. Never falls with more rows.

    Observed steps correct the times, but a single one changes nothing, however long it was. Each number of rows has a
    factor of its own; until it was observed often enough, a common factor stands for it.
    """

    def __init__(self, measured: Iterable[tuple[int, float]], *, padded: bool = False) -> None:
        """measured: (rows, time in any unit), in any order. padded: steps of numbers of rows in between are padded to
        the next one, as in CUDA graphs; otherwise their times are interpolated.

        Raises ConfigError without two numbers of rows.
        """
        self._padded = padded
        best: dict[int, float] = {}
        for rows, time in measured:
            best[rows] = min(time, best.get(rows, time))  # what disturbs a measurement makes it longer
        if len(best) < 2 or not all(rows >= 1 and time > 0 for rows, time in best.items()):
            raise ConfigError(f"the times of steps are {best}; give those of two or more numbers of rows, all positive")
        self._rows = np.array(sorted(best), np.int64)
        self._times = np.maximum.accumulate(np.array([best[rows] for rows in self._rows]))
        self._table = np.zeros(0)
        self._base = np.zeros(0)
        """The table by the measurements alone."""
        self._factors = np.ones(len(self._rows))
        """Time of observed steps relative to the measurement, by number of rows."""
        self._counts = np.zeros(len(self._rows), np.int64)
        self._medians = [RecentMedian(1.0, 1.0) for _ in self._rows]
        self._factor = 1.0
        """The same, common to all numbers of rows."""
        self._count = 0

    def table(self, rows: int) -> npt.NDArray[np.float64]:
        """The times of steps by their rows, from 0 to `rows` at least."""
        if len(self._table) <= rows:
            numbers = np.arange(max(rows + 1, 2 * len(self._table)))
            self._base = self._interpolated(self._times, numbers)
            self._table = self._corrected()
        return self._table

    def observe(self, rows: int, time: float) -> None:
        """Correct the times by an observed step."""
        self.table(rows)
        size = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        ratio = self._medians[size].add(time / float(self._base[rows]))
        self._count += 1
        self._counts[size] += 1
        self._factor += (ratio - self._factor) * max(_SLOW, 1 / (_BEFORE + self._count))
        self._factors[size] += (ratio - self._factors[size]) * max(_SLOW, 1 / (_BEFORE + float(self._counts[size])))
        if self._count % _REFRESH == 0:
            self._table = self._corrected()

    def _corrected(self) -> npt.NDArray[np.float64]:
        factors = np.where(self._counts >= _FEW, self._factors, self._factor)
        table = self._base * np.interp(np.arange(len(self._base)), self._rows, factors)
        return np.maximum.accumulate(table)

    def _interpolated(self, times: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The times of these numbers of rows."""
        if self._padded:
            table = times[np.searchsorted(self._rows, numbers).clip(max=len(self._rows) - 1)]
        else:
            table = np.interp(numbers, self._rows, times)
        (before, last), (start, end) = self._rows[-2:], times[-2:]
        beyond: npt.NDArray[np.float64] = table + (end - start) / (last - before) * np.maximum(numbers - last, 0)
        return beyond
