"""The time of a step by the number of its rows, from measurements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.core.errors import ConfigError


class StepCosts:
    """Measured times of steps, linear beyond the last measurement. Never falls with more rows."""

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

    def table(self, rows: int) -> npt.NDArray[np.float64]:
        """The times of steps by their rows, from 0 to `rows` at least."""
        if len(self._table) <= rows:
            numbers = np.arange(max(rows + 1, 2 * len(self._table)))
            if self._padded:
                table = self._times[np.searchsorted(self._rows, numbers).clip(max=len(self._rows) - 1)]
            else:
                table = np.interp(numbers, self._rows, self._times)
            (before, last), (start, end) = self._rows[-2:], self._times[-2:]
            slope = (end - start) / (last - before)
            self._table = table + slope * np.maximum(numbers - last, 0)
        return self._table
