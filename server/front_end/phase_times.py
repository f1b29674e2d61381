"""CPU time of a front end's event loop by phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import thread_time
from typing import ParamSpec, TypeVar

from engine.server.shared.metrics_table import FRONT_END_PHASES, FrontEndPhase

P = ParamSpec("P")
T = TypeVar("T")


class PhaseTimes:
    """Measures nothing: functions stay as they are."""

    def timed(self, phase: FrontEndPhase, function: Callable[P, T]) -> Callable[P, T]:
        """The function, with its CPU time counted as the phase's; for functions that the event loop's thread calls."""
        return function

    def timed_in_thread(self, phase: FrontEndPhase, function: Callable[[], T]) -> Callable[[], T]:
        """The function, with its CPU time counted as the phase's; for a function that another thread calls."""
        return function

    def update(self) -> None:
        """Count the time since the last change of phase; called by the event loop's thread."""


class MeasuredPhaseTimes(PhaseTimes):
    """Adds up CPU time by phase; the time of a nested phase does not count for the outer one.

    All time of the event loop outside timed functions is of the first phase, http. A call of a timed function costs
    about 2 us: two readings of the thread's clock, which are system calls.
    """

    def __init__(self, cells: memoryview[float], clock: Callable[[], float] = thread_time) -> None:
        """cells: seconds of each of FRONT_END_PHASES. clock: CPU time of the calling thread."""
        self._cells = cells
        self._clock = clock
        self._current = 0
        self._of_threads: deque[tuple[int, float]] = deque()
        """(phase, seconds) of threads that are not counted yet: only the event loop's thread writes the cells."""
        self._since = clock()

    def timed(self, phase: FrontEndPhase, function: Callable[P, T]) -> Callable[P, T]:
        number = FRONT_END_PHASES.index(phase)

        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            outer = self._change(number)
            try:
                return function(*args, **kwargs)
            finally:
                self._change(outer)

        return measured

    def timed_in_thread(self, phase: FrontEndPhase, function: Callable[[], T]) -> Callable[[], T]:
        number = FRONT_END_PHASES.index(phase)

        def measured() -> T:
            begin = self._clock()
            try:
                return function()
            finally:
                self._of_threads.append((number, self._clock() - begin))

        return measured

    def update(self) -> None:
        self._change(self._current)
        while self._of_threads:
            number, seconds = self._of_threads.popleft()
            self._cells[number] += seconds

    def _change(self, number: int) -> int:
        """Begin a phase; the number of the one before."""
        now = self._clock()
        self._cells[self._current] += now - self._since
        self._since = now
        before, self._current = self._current, number
        return before
