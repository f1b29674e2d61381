"""Waits of any length, by waits of a slice, between which Python runs the handlers of signals."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.shm.errors import RingTimeoutError
from engine.core.shm.signals import Status

SLICE = 200_000_000
"""Nanoseconds a wait stays outside Python: as long as a signal may wait for its handler that came just before it slept,
or to another thread."""
_NEVER = 2**62
"""Nanoseconds."""


def end_of(timeout: float | None) -> int:
    """When a wait of so many seconds is over that begins now, as time.monotonic_ns(). None: it is never over."""
    return _NEVER if timeout is None else time.monotonic_ns() + int(timeout * 1e9)


def wait(attempt: Callable[[int], int], end: int, timeout: float | None) -> int:
    """The status that ends a wait; `attempt` waits until a moment, and returns one.

    end: `end_of(timeout)`, as it was when the wait began. Raises RingTimeoutError.
    """
    while True:
        found = attempt(min(end, time.monotonic_ns() + SLICE))
        if found != Status.PENDING:
            return found
        if time.monotonic_ns() >= end:
            raise RingTimeoutError(f"nothing happened in {timeout} s")
