"""The median of the last three measurements, which one that was disturbed does not change."""

from __future__ import annotations

from collections import deque


class RecentMedian:
    """Filters measurements of which single ones may be many times too long, as that of the first use of a kernel.

    given: what measurements are taken to have been before the first one, at most two of them.
    """

    __slots__ = ("_last",)

    def __init__(self, *given: float) -> None:
        self._last = deque(given, maxlen=3)

    def add(self, value: float) -> float:
        """Add a measurement; returns the median of the last three, of two the smaller one."""
        self._last.append(value)
        return sorted(self._last)[(len(self._last) - 1) // 2]
