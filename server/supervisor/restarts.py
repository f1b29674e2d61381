"""Whether and when a replica that has died is started anew."""

from __future__ import annotations

LONGEST_PAUSE = 60.0
"""Seconds."""
STEADY = 600.0
"""Seconds of life after which a death is no sequel of the ones before."""


class Restarts:
    """The tries of one replica: a few, with growing pauses between them."""

    def __init__(self, most: int, pause: float) -> None:
        """most: tries; pause: seconds before the first."""
        self.most = most
        self.tried = 0
        """Tries since it was last steady."""
        self._pause = pause

    def next(self, lived: float) -> float | None:
        """It has died: seconds until the next try, or None when there are no more. lived: for how many seconds it took
        requests."""
        if lived >= STEADY:
            self.tried = 0
        if self.tried >= self.most:
            return None
        self.tried += 1
        return float(min(self._pause * 2 ** (self.tried - 1), LONGEST_PAUSE))
