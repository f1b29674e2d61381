"""Decides whether and when the engine process of a replica is restarted."""

from __future__ import annotations

MAX_DELAY = 60.0
"""Seconds."""
STABLE_UPTIME = 600.0
"""Seconds of uptime after which a replica has all its tries again."""


class RestartPolicy:
    """Allows one replica a limited number of restarts, after delays that double."""

    def __init__(self, max_tries: int, first_delay: float) -> None:
        """first_delay: seconds before the first restart."""
        self.max_tries = max_tries
        self.tries = 0
        """Restarts since the replica was last stable."""
        self._first_delay = first_delay

    def next_delay(self, uptime: float) -> float | None:
        """Seconds to wait before restarting a process that has exited; None: do not restart.

        uptime: seconds for which the process accepted requests.
        """
        if uptime >= STABLE_UPTIME:
            self.tries = 0
        if self.tries >= self.max_tries:
            return None
        self.tries += 1
        return float(min(self._first_delay * 2 ** (self.tries - 1), MAX_DELAY))
