"""The run of a sweep: measures cases until a time limit, goes on after failures, and names them at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from triton.errors import TritonError

from engine.core.errors import EngineError

if TYPE_CHECKING:
    from shape_sweep import Result

MAX_ERROR = 0.1
"""Maximum relative error of a result: from the quantization of activations, and from bfloat16."""

T = TypeVar("T")


class SweepRun:
    """One run, from when this is made."""

    def __init__(self, limit: float) -> None:
        """limit: no case starts after this many seconds."""
        self._limit = limit
        self._begin = time.perf_counter()
        self._failures: list[str] = []
        self.results: list[Result] = []

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    def is_over(self, left_out: str) -> bool:
        """Whether the time is over; if so, print what is left out. left_out: with its verb, as "decode is"."""
        if self.seconds <= self._limit:
            return False
        print(f"{left_out} left out: {self._limit:.0f} s are over", flush=True)
        return True

    def prepare(self, kind: str, work: Callable[[], T]) -> T | None:
        """The result of what all cases of a kind need. None: it failed; the other kinds may still run."""
        return self._attempt(kind, work, (EngineError, TritonError, RuntimeError))

    def measure(self, name: str, work: Callable[[], Result], describe: Callable[[Result], str]) -> bool:
        """Measure a case and print it, unless the time is over. Returns whether there is a new result."""
        if self.is_over(f"{name} is"):
            return False
        found = self._attempt(name, work, (TritonError, RuntimeError))
        if found is None:
            return False
        self.results.append(found)
        print(describe(found), flush=True)
        return True

    def _attempt(self, name: str, work: Callable[[], T], errors: tuple[type[Exception], ...]) -> T | None:
        try:
            return work()
        except errors as error:
            self._failures.append(name)
            print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
            return None

    def end(self) -> None:
        """End the process with an error if something failed or is wrong."""
        failures = [*self._failures, *(one.case.name for one in self.results if not one.error < MAX_ERROR)]
        if failures:
            raise SystemExit(f"error: these failed or are wrong; see above: {'; '.join(failures)}")
