"""Notices a process that lives but whose loop does not run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.server.shared.metrics_table import HEARTBEAT_INTERVAL


class Silence:
    """For how long a process's loop has not run, as the supervisor sees it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def lasts(self, heartbeat: Callable[[], float], timeout: float, start_timeout: float = 0.0) -> float:
        """Wait until the heartbeat has not changed for `timeout` seconds; the seconds that were waited.

        heartbeat: a number that the loop changes in each iteration. start_timeout: minimum seconds until the first
        change.

        Counts intervals in which this process ran, rather than the time: a machine or a terminal that stops the whole
        server must not look like a process that hangs.
        """
        last = heartbeat()
        self.seconds = 0.0
        limit = max(start_timeout, timeout)
        while self.seconds < limit:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            self.seconds += HEARTBEAT_INTERVAL
            if (now := heartbeat()) != last:
                last, limit = now, timeout
                self.seconds = 0.0
        return limit
