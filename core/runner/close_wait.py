"""Waits, with little delay, for a step whose result the next step needs and whose end can be predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_MARGIN = 300e-6
"""Seconds before and after the expected end in which the host polls whether the step has ended."""
_WEIGHT = 0.1
"""Weight of a step in the expected time."""
_EARLIER = 0.98
"""Factor of the expected time after a step that had ended at the first poll: it may have ended much earlier."""


class CloseWait:
    """Sleeps until shortly before a step ends, then polls until it has ended.

    A thread that sleeps until the device wakes it loses 0.15 ms: nothing where the next step runs meanwhile, but 3 % of
    a step with drafts, during which the device has nothing else to do. At most 0.6 ms of each such step are spent on
    polling; other threads may run in between.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._expected: dict[Hashable, float] = {}
        """Seconds from the launch of a step to its end, by kind of step."""

    def wait(self, kind: Hashable, launched: float, ready: Callable[[], bool]) -> bool:
        """Wait for a step; return whether it has ended. If not, the caller waits for it, and then calls `ended`.

        kind: steps of one kind take about as long; launched: when the step was launched, by the clock; ready: returns
        whether it has ended. Returns without waiting for the first step of a kind, and gives up on a step that takes
        much longer than expected.
        """
        expected = self._expected.get(kind)
        if expected is None:
            return False
        if (pause := launched + expected - _MARGIN - self._clock()) > 0:
            self._sleep(pause)
        if ready():
            self._expected[kind] = expected * _EARLIER
            return True
        last = launched + expected + _MARGIN
        while self._clock() < last:
            self._sleep(0)
            if ready():
                self.ended(kind, launched)
                return True
        return False

    def ended(self, kind: Hashable, launched: float) -> None:
        """Learn from a step that ends now."""
        seconds = self._clock() - launched
        expected = self._expected.get(kind, seconds)
        self._expected[kind] = expected + _WEIGHT * (seconds - expected)
