"""How long the device is idle before a step with drafts, by the number of sequences."""

from __future__ import annotations

from attrs import define, field

from engine.core.speculators.recent_median import RecentMedian

_FIRST = 3
"""Number of first gaps for which the median alone counts."""
_SLOW = 0.02
"""Weight of a gap after the first 50."""


@define
class _Mean:
    time: float = 0.0
    count: int = 0
    median: RecentMedian = field(factory=RecentMedian)

    def add(self, time: float) -> None:
        self.count += 1
        median = self.median.add(time)
        self.time += (median - self.time) * (1.0 if self.count <= _FIRST else max(_SLOW, 1 / self.count))


class Gaps:
    """Typical gaps by magnitude of the number of sequences: the host takes longer for more of them."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}

    def observe(self, time: float, sequences: int) -> None:
        """Learn from a gap before a step with drafts.

        time: in any unit; sequences: all of the step, with drafts or without.
        """
        self._means.setdefault(sequences.bit_length(), _Mean()).add(time)

    def expected(self, sequences: int) -> float:
        """The gap before a step of this number of sequences, or of the nearest there was; 0 before the first."""
        if not self._means:
            return 0.0
        wanted = sequences.bit_length()
        return self._means[min(self._means, key=lambda magnitude: abs(magnitude - wanted))].time
