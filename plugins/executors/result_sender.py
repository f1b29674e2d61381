"""Sends the results of in-flight steps from a thread of its own, so that the worker can wait for steps meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from engine.core.executors import MAX_STEPS_IN_FLIGHT, PendingResult

SendResult = Callable[[int, PendingResult], None]
"""Waits for the result of a step, given its number, and sends the result."""
ReportFailure = Callable[[str, BaseException], None]
"""Reports an error, given the phase in which it was raised."""


class ResultSender:
    """Sends results in the order in which their steps were begun."""

    def __init__(self, send: SendResult, fail: ReportFailure) -> None:
        """send, fail: called in the sender's thread, which ends after `fail`."""
        self._send = send
        self._fail = fail
        self._begun: SimpleQueue[tuple[int, PendingResult] | None] = SimpleQueue()
        self._room = threading.Semaphore(MAX_STEPS_IN_FLIGHT)
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Wait until fewer than MAX_STEPS_IN_FLIGHT steps are in flight."""
        self._room.acquire()

    def add(self, step: int, pending: PendingResult) -> None:
        """Take over a step that was begun after `wait_for_room`."""
        self._begun.put((step, pending))

    def wait_until_idle(self) -> None:
        """Wait until the results of all steps taken over are sent."""
        for _ in range(MAX_STEPS_IN_FLIGHT):
            self._room.acquire()
        self._room.release(MAX_STEPS_IN_FLIGHT)

    def finish(self) -> None:
        """Wait until all results are sent."""
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                self._send(*begun)
            except BaseException as error:
                self._fail(f"step {begun[0]}", error)
                return
            self._room.release()
