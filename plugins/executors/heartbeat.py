"""Heartbeats and progress of workers in shared memory: each worker writes its own row, the executor reads all rows."""

from __future__ import annotations

import mmap
import os
import threading
import time

COLUMNS = 6
"""Numbers per row: heartbeat, steps begun, steps finished, thread that begins steps, thread that waits, last step."""
ROW_BYTES = 8 * COLUMNS


class HeartbeatTable:
    """The rows of all workers. A number is eight bytes, written atomically."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """descriptor: of a file made by `create`; the caller may close it afterwards."""
        self._map = mmap.mmap(descriptor, ROW_BYTES * ranks)
        self._cells = memoryview(self._map).cast("d")
        self._ranks = ranks

    @staticmethod
    def create(ranks: int) -> int:
        """Create the table's memory and return its file descriptor. The memory has no name in any file system."""
        descriptor = os.memfd_create("engine-heartbeats")
        os.ftruncate(descriptor, ROW_BYTES * ranks)
        return descriptor

    def row(self, rank: int) -> WorkerHeartbeat:
        """Return the row of one worker."""
        return WorkerHeartbeat(self._cells[COLUMNS * rank : COLUMNS * (rank + 1)])

    def rows(self) -> list[WorkerHeartbeat]:
        """Return all rows, by rank."""
        return [self.row(rank) for rank in range(self._ranks)]


class WorkerHeartbeat:
    """One worker's row: its heartbeat, how many steps it has begun and finished, and the threads that run them.

    Steps are counted, since steps before the first request have the same number.
    """

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells

    @classmethod
    def private(cls) -> WorkerHeartbeat:
        """Make a row in memory that no other process sees."""
        return cls(memoryview(bytearray(ROW_BYTES)).cast("d"))

    def beat(self) -> None:
        """Record a heartbeat."""
        self._cells[0] = time.monotonic()

    def begin_step(self, step: int) -> None:
        """Record that this thread begins a step."""
        self._cells[5] = step
        self._cells[1] += 1
        self._cells[3] = threading.get_ident()

    def begin_wait(self) -> None:
        """Record that this thread waits for the result of a step."""
        self._cells[4] = threading.get_ident()

    def finish_step(self) -> None:
        """Record that the result of the oldest step in progress was sent."""
        self._cells[2] += 1
        self._cells[4] = 0

    def begin_call(self) -> None:
        """Record that this thread runs a control call, until `finish_call`."""
        self._cells[4] = threading.get_ident()

    def finish_call(self) -> None:
        """Record that the control call is answered."""
        self._cells[4] = 0

    @property
    def time(self) -> float:
        """Time of the last heartbeat, time.monotonic(); 0: none yet."""
        return self._cells[0]

    @property
    def begun(self) -> int:
        """How many steps were begun."""
        return int(self._cells[1])

    @property
    def finished(self) -> int:
        """How many steps were finished."""
        return int(self._cells[2])

    @property
    def step(self) -> int:
        """Number of the last step begun."""
        return int(self._cells[5])

    @property
    def busy_threads(self) -> tuple[int, int]:
        """Identifiers (threading.get_ident) of the thread that waits for a result, or runs a control call, and of the
        thread that begins steps.

        0: there is none.
        """
        return int(self._cells[4]), int(self._cells[3])
