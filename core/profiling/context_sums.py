"""Sums of the context lengths of decoding sequences, kept up to date without looking at each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from engine.core.profiling.step_shape import Window


class ContextSums:
    """Sums over decoding sequences of min(context length, window), by window.

    A decoding sequence gains a token per iteration, so its context length is that of the shared iteration counter plus
    an offset, which changes with accepted drafts only: the sum of all offsets is enough. Adding, removing, advancing
    and reading take constant time, and one more heap operation per window and sequence when its context outgrows the
    window.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self._count = 0
        self._offsets = 0
        self._windows = [None if window is None else _Windowed(window) for window in windows]

    def __len__(self) -> int:
        """Number of decoding sequences."""
        return self._count

    def add(self, offset: int) -> None:
        """Add a sequence. offset: its tokens computed before an iteration, minus that iteration's number."""
        self._count += 1
        self._offsets += offset
        for windowed in self._windows:
            if windowed is not None:
                windowed.add(offset)

    def remove(self, offset: int) -> None:
        """Remove a sequence that was added with this offset."""
        self._count -= 1
        self._offsets -= offset
        for windowed in self._windows:
            if windowed is not None:
                windowed.remove(offset)

    def advance(self, gains: Sequence[tuple[int, int]]) -> None:
        """Add tokens to contexts in addition to those of the iterations. gains: (offset, tokens) of each sequence."""
        self._offsets += sum([tokens for _, tokens in gains])
        for windowed in self._windows:
            if windowed is not None:
                windowed.advance(gains)

    def at(self, iteration: int) -> list[int]:
        """The sum for each window of the contexts in an iteration, the token that it computes included.

        Iterations must not decrease from call to call.
        """
        after = iteration + 1
        total = self._offsets + self._count * after
        return [total if windowed is None else windowed.sum_at(after, self._count) for windowed in self._windows]


class _Windowed:
    """The sequences whose contexts are shorter than a window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._short: dict[int, int] = {}
        """Offset -> number of sequences with a context shorter than the window, when they were last looked at."""
        self._largest: list[int] = []
        """Heap of the offsets in `_short`, negated; and of some that are no longer there."""
        self._count = 0
        self._offsets = 0

    def add(self, offset: int) -> None:
        number = self._short.get(offset, 0)
        if not number:
            heappush(self._largest, -offset)
        self._short[offset] = number + 1
        self._count += 1
        self._offsets += offset

    def remove(self, offset: int) -> None:
        number = self._short.get(offset, 0)
        if number:
            self._drop(offset, 1)
            if number == 1:
                del self._short[offset]
            else:
                self._short[offset] = number - 1

    def advance(self, gains: Iterable[tuple[int, int]]) -> None:
        short = self._short
        for offset, tokens in gains:
            if offset in short:
                self.remove(offset)
                self.add(offset + tokens)

    def sum_at(self, after: int, count: int) -> int:
        """The sum over `count` sequences whose contexts are their offsets plus `after`."""
        while self._largest and after - self._largest[0] >= self._window:
            offset = -heappop(self._largest)
            self._drop(offset, self._short.pop(offset, 0))
        return self._offsets + self._count * after + (count - self._count) * self._window

    def _drop(self, offset: int, number: int) -> None:
        self._count -= number
        self._offsets -= number * offset
