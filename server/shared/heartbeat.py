"""The engine's heartbeat: a few numbers in a file that the engine process writes and the front ends read.

The heartbeat shows failures that a live process hides: a loop that hangs, or a device that no longer computes.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from attrs import frozen

from engine.core.executors import Health

FILE = "heartbeat-{}"
"""File name in the server's directory; filled with the replica."""
LOOP, WORKER_LOOP, WORKER_RANK, STEP_REQUESTED, STEP_COMPLETED = range(5)
NUM_CELLS = 5
"""Numbers in the file, eight bytes each: last iteration of the engine's loop; last iteration of the slowest idle
worker's loop; that worker's rank; when a step was requested that has not completed yet; when a requested step last
completed. Times are time.monotonic(), which all processes share; 0 is none."""

FaultLevel = Literal["process", "loop", "step"]
HealthStatus = Literal["ok", "degraded", "starting", "failed", "draining"]
"""`status` in the answers of /health."""


@frozen(kw_only=True)
class Fault:
    """What is wrong with a replica."""

    level: FaultLevel
    """process: exited or not started yet; loop: does not iterate; step: no step completes."""
    reason: str
    since: float
    """time.time(), seconds."""
    starting: bool = False
    """Whether the process has exited and its successor is loading."""
    restart: str = ""
    """State of the restart; empty if this replica is never restarted."""

    def body(self) -> dict[str, str]:
        """The JSON object that /health answers."""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="milliseconds")
        status: HealthStatus = "starting" if self.starting else "failed"
        body: dict[str, str] = {"status": status, "level": self.level, "reason": self.reason, "since": since}
        return body | ({"restart": self.restart} if self.restart else {})


class Heartbeat:
    """One process's mapping of a replica's heartbeat file."""

    def __init__(self, cells: memoryview[float], clock: Callable[[], float] = time.monotonic) -> None:
        """cells: `NUM_CELLS` numbers."""
        self._cells = cells
        self._clock = clock

    @classmethod
    def map(cls, directory: str, replica: int, *, create: bool = False) -> Heartbeat:
        """Map the heartbeat of a replica of the server that owns `directory`.

        create: for the engine process. The replica's first process creates the file, and each process resets it.
        """
        file = Path(directory) / FILE.format(replica)
        if create and not file.exists():
            file.write_bytes(bytes(8 * NUM_CELLS))
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * NUM_CELLS)).cast("d")
        if create:  # in place: front ends have mapped the file
            cells[:] = memoryview(bytes(8 * NUM_CELLS)).cast("d")
        return cls(cells)

    def record_loop(self, idle: Health | None) -> None:
        """Record an iteration of the engine's loop. idle: the executor's health while there is nothing to compute."""
        worker_loop = idle.heartbeat if idle is not None else None
        self._cells[WORKER_LOOP] = worker_loop or 0.0
        self._cells[WORKER_RANK] = idle.rank if idle is not None else 0
        self._cells[LOOP] = self._clock()

    def request_step(self) -> None:
        """Record that a step must complete."""
        self._cells[STEP_REQUESTED] = self._cells[STEP_REQUESTED] or self._clock()

    def record_step(self) -> None:
        """Record that a requested step has completed."""
        self._cells[STEP_COMPLETED] = self._clock()
        self._cells[STEP_REQUESTED] = 0.0

    @property
    def loop(self) -> float:
        """When the engine's loop last began an iteration, time.monotonic(); 0: never."""
        return self._cells[LOOP]

    @property
    def step_completed(self) -> float:
        """When a requested step last completed, time.monotonic()."""
        return self._cells[STEP_COMPLETED]

    def fault(self, timeout: float) -> Fault | None:
        """The loop or the step that is more than `timeout` seconds late."""
        cells = self._cells
        loops = [("the engine's loop", cells[LOOP]), (f"the loop of rank {cells[WORKER_RANK]:.0f}", cells[WORKER_LOOP])]
        now = self._clock()
        for name, at in loops:
            if at and now - at > timeout:
                return self._fault("loop", f"{name} has been stuck for {now - at:.0f} s", at)
        requested = cells[STEP_REQUESTED]
        return self.missing_step(requested) if requested and now - requested > timeout else None

    def missing_step(self, requested: float) -> Fault:
        """The fault that no step has completed since `requested`, time.monotonic()."""
        seconds = self._clock() - requested
        return self._fault("step", f"no step has completed for {seconds:.0f} s although one was requested", requested)

    def _fault(self, level: FaultLevel, reason: str, at: float) -> Fault:
        return Fault(level=level, reason=reason, since=time.time() - (self._clock() - at))
