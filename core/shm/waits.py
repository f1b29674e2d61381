"""Waits of any length, split into short waits, between which Python runs signal handlers."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.shm.errors import RingTimeoutError
from engine.core.shm.signals import Status

SLICE = 200_000_000
"""Maximum length of one short wait, nanoseconds: also the maximum delay of a signal handler, where the signal comes
just before the wait sleeps, or to another thread."""
_NEVER = 2**62
"""Nanoseconds."""


def end_of(timeout: float | None) -> int:
    """Return the end of a wait of `timeout` seconds that begins now, as time.monotonic_ns(); None: no timeout."""
    return _NEVER if timeout is None else time.monotonic_ns() + int(timeout * 1e9)


def wait(attempt: Callable[[int], int], end: int, timeout: float | None) -> int:
    """Repeat short waits until one ends with another status than PENDING; return that status.

    attempt: waits until a time.monotonic_ns() and returns a Status; end: `end_of(timeout)` when the wait began.
    Raises RingTimeoutError.
    """
    while True:
        found = attempt(min(end, time.monotonic_ns() + SLICE))
        if found != Status.PENDING:
            return found
        if time.monotonic_ns() >= end:
            raise RingTimeoutError(f"nothing happened in {timeout} s")
