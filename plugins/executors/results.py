"""Waits for the steps under way in a thread of its own, so that nobody who waits for two things has to spin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from engine.core.executors import MAX_STEPS_IN_FLIGHT, PendingResult

Answer = Callable[[int, PendingResult], None]
"""Given a step's number and the step, waits for its result and sends it."""
Fail = Callable[[str, BaseException], None]
"""Given a phase and what happened in it."""


class Answers:
    """Steps are answered in the order in which they were begun."""

    def __init__(self, answer: Answer, fail: Fail) -> None:
        """fail: called in the thread, which ends then."""
        self._answer = answer
        self._fail = fail
        self._begun: SimpleQueue[tuple[int, PendingResult] | None] = SimpleQueue()
        self._room = threading.Semaphore(MAX_STEPS_IN_FLIGHT)
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def make_room(self) -> None:
        """Wait until one step less than may be under way is."""
        self._room.acquire()

    def add(self, step: int, pending: PendingResult) -> None:
        """A step was begun, for which there was room."""
        self._begun.put((step, pending))

    def end(self) -> None:
        """Wait until all steps are answered."""
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                self._answer(*begun)
            except BaseException as error:
                self._fail(f"step {begun[0]}", error)
                return
            self._room.release()
