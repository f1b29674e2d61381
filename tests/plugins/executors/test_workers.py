"""The thread that watches worker processes, around a clock and processes that a test controls."""

from __future__ import annotations

import select
from typing import Any

import pytest

from engine.core.errors import ExecutorError
from engine.plugins.executors import workers as workers_module
from engine.plugins.executors.workers import Workers

PIDFD = 1000
EXITS_AFTER = 5.0
"""Seconds from the kill to the exit, as of a process that has memory of a GPU."""


class SlowToExit:
    """A worker process that takes a while to exit after it was killed."""

    rank = 0
    pidfd = PIDFD

    def __init__(self) -> None:
        self.alive = True
        self.kills = 0
        self.connection = self

    def __str__(self) -> str:
        return "the worker of rank 0"

    def fileno(self) -> int:
        return PIDFD + 1

    def receive(self) -> None:
        return None

    def kill(self) -> None:
        self.kills += 1

    def reap(self) -> None:
        self.alive = False


class Poller:
    """Stands in for select.poll and time.monotonic: the time that passes is that of the polls."""

    def __init__(self, worker: SlowToExit) -> None:
        self.worker = worker
        self.now = 0.0
        self.exits_at: float | None = None
        self.polls = 0

    def monotonic(self) -> float:
        return self.now

    def register(self, descriptor: object, events: int) -> None:
        pass

    def unregister(self, descriptor: object) -> None:
        pass

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.polls += 1
        assert self.polls < 100, "the loop spins"
        self.now += milliseconds / 1000
        if self.exits_at is None and self.worker.kills:
            self.exits_at = self.now + EXITS_AFTER
        return [(PIDFD, select.POLLIN)] if self.exits_at is not None and self.now >= self.exits_at else []


@pytest.mark.parametrize("why", ["a stop", "an error"])
def test_workers_are_killed_once_and_awaited_without_spinning_when_they_exit_slowly(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    process: Any = SlowToExit()
    poller = Poller(process)
    monkeypatch.setattr(workers_module.select, "poll", lambda: poller)
    monkeypatch.setattr(workers_module.time, "monotonic", poller.monotonic)
    workers = Workers([], lambda reason: None, step_timeout=30.0)
    workers.workers = [process]
    if why == "a stop":
        workers._stop_by = 3.0
    else:
        workers._record_error(ExecutorError(f"{process} failed"))
    workers._watch()
    workers.stop()
    assert process.kills == 1
    assert not process.alive
