"""The median of the last three measurements, on which a single disturbed one has no effect."""

from __future__ import annotations

from collections import deque


class RecentMedian:
    """Filters out single measurements that are many times too long, such as the first use of a kernel.

    given: at most two measurements to assume before the first one.
    """

    __slots__ = ("_last",)

    def __init__(self, *given: float) -> None:
        self._last = deque(given, maxlen=3)

    def add(self, value: float) -> float:
        """Add a measurement; returns the median of the last three, of two the smaller one."""
        self._last.append(value)
        return sorted(self._last)[(len(self._last) - 1) // 2]
