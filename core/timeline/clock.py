"""Relates CLOCK_MONOTONIC, which spans are measured by, to Unix time, which processes and torch.profiler share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

TRIES = 20
"""Readings of both clocks of which the closest pair counts."""


class ClockPair(msgspec.Struct, frozen=True, array_like=True):
    """One moment on both clocks, ns."""

    monotonic: int
    unix: int
    error: int
    """Maximum error of the pair, ns: half the time between the two readings of the monotonic clock around `unix`."""


def read_clocks() -> ClockPair:
    """Read both clocks as closely together as a few tries allow."""
    pairs = []
    for _ in range(TRIES):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        pairs.append(ClockPair((before + after) // 2, unix, (after - before + 1) // 2))
    return min(pairs, key=lambda pair: pair.error)


def to_unix(pairs: Sequence[ClockPair], monotonic: int) -> int:
    """Convert a time to Unix ns, linearly between the first and the last pair: Unix time is slewed now and then."""
    first, last = pairs[0], pairs[-1]
    elapsed = monotonic - first.monotonic
    span = last.monotonic - first.monotonic
    if span <= 0:
        return first.unix + elapsed
    drift = (last.unix - first.unix) - span
    return first.unix + elapsed + round(drift * elapsed / span)
