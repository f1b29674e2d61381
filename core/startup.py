"""What happens while an engine starts: which phase, how far it is, and how long each one took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import frozen

BYTES = "bytes"


@frozen(kw_only=True)
class Progress:
    """How far a phase is. Plain data: an executor's other processes can send it."""

    phase: str
    done: int = 0
    total: int = 0
    """0: nobody knows how much there is to do."""
    unit: str = BYTES
    """Of `done` and `total`; any other is a word for what is counted."""
    seconds: float = 0.0
    """Since the phase began."""
    rank: int | None = None
    """Whose phase, where several processes start at once."""


Listener = Callable[[Progress], None]
"""Told when a phase begins, and how far it is."""


class Phases:
    """Measures phases. One within another does not count for the outer one too, so that they add up to the whole."""

    def __init__(self, listener: Listener | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._listener = listener
        self._clock = clock
        self._took: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time within the `with` block belongs to phase `name`; also to what it took before, if it is not new."""
        self._lap()
        self._open.append((name, self._since))
        self._took.setdefault(name, 0.0)
        self._tell(Progress(phase=name))
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def progress(self, done: int, total: int, unit: str = BYTES) -> None:
        """Tell how far the present phase is."""
        name, begun = self._open[-1]
        self._tell(Progress(phase=name, done=done, total=total, unit=unit, seconds=self._clock() - begun))

    def include(self, phases: Iterable[tuple[str, float]]) -> None:
        """Count phases (name, seconds) that were measured elsewhere during the present one, and not for it too."""
        for name, seconds in phases:
            self._took[name] = self._took.get(name, 0.0) + seconds
            outer, _ = self._open[-1]
            self._took[outer] -= seconds

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(phase, seconds), in the order in which they first began."""
        return tuple(self._took.items())

    def _lap(self) -> None:
        """What is over belongs to the innermost phase."""
        now = self._clock()
        if self._open:
            self._took[self._open[-1][0]] += now - self._since
        self._since = now

    def _tell(self, progress: Progress) -> None:
        if self._listener is not None:
            self._listener(progress)


def sentence(progress: Progress) -> str:
    """A phase in words: rank 1: weights: 12.3 of 16.1 GB, 3.1 GB/s."""
    phase = progress.phase if progress.rank is None else f"rank {progress.rank}: {progress.phase}"
    if not progress.total:
        return phase
    if progress.unit != BYTES:
        return f"{phase}: {progress.done} of {progress.total} {progress.unit}"
    done, total = (f"{count / 1e9:.1f}" for count in (progress.done, progress.total))
    speed = f", {progress.done / progress.seconds / 1e9:.1f} GB/s" if progress.seconds else ""
    return f"{phase}: {done} of {total} GB{speed}"
