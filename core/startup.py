"""Measures the phases of an engine's start and reports their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import frozen

BYTES = "bytes"
MAX_SECONDS_LEFT = 100 * 3600.0
"""A longer time left is not shown: a transfer that slow has hardly begun."""


@frozen(kw_only=True)
class Progress:
    """Progress of a start-up phase. Plain data, so that worker processes can send it."""

    phase: str
    done: int = 0
    total: int = 0
    """0: unknown."""
    unit: str = BYTES
    """Unit of `done` and `total`: "bytes", or a plural noun for what is counted."""
    seconds: float = 0.0
    """Seconds since the phase began."""
    rate: float | None = None
    """Of a transfer: units per second over the last seconds; 0: nothing arrives. None: the phase is no transfer."""
    rank: int | None = None
    """Rank of the worker, if there are several; None: the engine process."""


Listener = Callable[[Progress], None]
"""Called when a phase begins, and with its progress."""


class Phases:
    """Measures phases. Time in a nested phase does not count for the outer one, so that all add up to the total."""

    def __init__(self, listener: Listener | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._listener = listener
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []  # (name, begin) of the phases in progress, outermost first
        self._last_lap = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the `with` block as phase `name`; a phase entered again adds to its earlier time."""
        self._lap()
        self._open.append((name, self._last_lap))
        self._seconds.setdefault(name, 0.0)
        self._report(Progress(phase=name))
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def progress(self, done: int, total: int, unit: str = BYTES) -> None:
        """Report the progress of the current phase."""
        name, begin = self._open[-1]
        self._report(Progress(phase=name, done=done, total=total, unit=unit, seconds=self._clock() - begin))

    def include(self, phases: Iterable[tuple[str, float]]) -> None:
        """Add phases (name, seconds) measured elsewhere during the current phase, and subtract them from the latter."""
        for name, seconds in phases:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            outer, _ = self._open[-1]
            self._seconds[outer] -= seconds

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(phase, seconds), in the order in which the phases first began."""
        return tuple(self._seconds.items())

    def _lap(self) -> None:
        """Add the time since the last lap to the innermost phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1][0]] += now - self._last_lap
        self._last_lap = now

    def _report(self, progress: Progress) -> None:
        if self._listener is not None:
            self._listener(progress)


def format_progress(progress: Progress) -> str:
    """Format as, for example, "rank 1: weights: 12.3 of 16.1 GB, 3.1 GB/s"; a transfer also as share and time left."""
    phase = progress.phase if progress.rank is None else f"rank {progress.rank}: {progress.phase}"
    if not progress.total:
        return phase
    if progress.unit != BYTES:
        return f"{phase}: {progress.done} of {progress.total} {progress.unit}"
    if progress.rate is not None:
        return f"{phase}: {_format_transfer(progress, progress.rate)}"
    done, total = (f"{count / 1e9:.1f}" for count in (progress.done, progress.total))
    speed = f", {progress.done / progress.seconds / 1e9:.1f} GB/s" if progress.seconds else ""
    return f"{phase}: {done} of {total} GB{speed}"


def _format_transfer(progress: Progress, rate: float) -> str:
    """Format as, for example, "431 MB of 1.52 GB (28%), 45.1 MB/s, 24 s left"."""
    text = f"{format_size(progress.done)} of {format_size(progress.total)} ({progress.done / progress.total:.0%})"
    if progress.done >= progress.total:
        return text
    if not rate:
        return f"{text}, waiting"
    seconds = (progress.total - progress.done) / rate
    left = f", {format_duration(seconds)} left" if seconds < MAX_SECONDS_LEFT else ""
    return f"{text}, {format_size(rate)}/s{left}"


def format_size(count: float) -> str:
    """Format a number of bytes in three digits: 45.1 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.0f} {units[0]}" if units[0] == "B" else f"{count:.3g} {units[0]}"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 24 s, 3 min 10 s, 1 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
