"""Signs of life in shared memory: each worker writes its own row, the executor reads all."""

from __future__ import annotations

import mmap
import os
import time

COLUMNS = 3
"""Numbers a row: time of the last round of the loop, number of the last step begun, number of the last step done."""


class Beats:
    """The rows of all workers. A number is eight bytes, written at once."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """descriptor: of a file that `make` made; it may be closed afterwards."""
        self._map = mmap.mmap(descriptor, 8 * COLUMNS * ranks)
        self._cells = memoryview(self._map).cast("d")
        self._ranks = ranks

    @staticmethod
    def make(ranks: int) -> int:
        """A file descriptor: memory without a name, which goes with the last process that has it."""
        descriptor = os.memfd_create("engine-beats")
        os.ftruncate(descriptor, 8 * COLUMNS * ranks)
        return descriptor

    def row(self, rank: int) -> Beat:
        """The row of one worker."""
        return Beat(self._cells[COLUMNS * rank : COLUMNS * (rank + 1)])

    def rows(self) -> list[Beat]:
        """All, by rank."""
        return [self.row(rank) for rank in range(self._ranks)]


class Beat:
    """One worker's row."""

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells

    def beat(self) -> None:
        """The loop goes round."""
        self._cells[0] = time.monotonic()

    def begin(self, step: int) -> None:
        """A step is about to be computed."""
        self._cells[1] = step

    def done(self, step: int) -> None:
        """A step's result is there."""
        self._cells[2] = step

    @property
    def at(self) -> float:
        """Time of the last round, time.monotonic(); 0: none yet."""
        return self._cells[0]

    @property
    def begun(self) -> int:
        """Number of the last step begun."""
        return int(self._cells[1])

    @property
    def finished(self) -> int:
        """Number of the last step done."""
        return int(self._cells[2])
