"""Overflow area of a ring: holds messages longer than a slot, behind the slots. Only the writer allocates."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from attrs import frozen

from engine.core.shm.segment import Segment, no_space, pages, write


@frozen
class _Allocation:
    """File range [begin, end) of message number `sequence`."""

    sequence: int
    begin: int
    end: int


class OverflowArea:
    """Grows the file for long messages and shrinks it when all readers have received them.

    Messages are written and read by system calls, not through a mapping: a full file system is then an error, and not a
    signal that kills the process.
    """

    def __init__(self, segment: Segment, directory: Path) -> None:
        self._segment = segment
        self._directory = directory
        self._allocated: deque[_Allocation] = deque()
        self._end = segment.overflow_at

    @property
    def in_use(self) -> bool:
        """Whether the area takes memory."""
        return self._end > self._segment.overflow_at

    def put(self, message: memoryview, sequence: int) -> int:
        """Store a message and return its offset in the file. On RingSpaceError nothing is stored."""
        begin = self._find_gap(pages(len(message)))
        end = begin + pages(len(message))
        try:
            write(self._segment.file, message, begin)
        except OSError as error:
            self._end = max(self._end, end)
            self._shrink()
            raise no_space(self._directory, "a message longer than a slot", len(message)) from error
        self._allocated.append(_Allocation(sequence, begin, end))
        self._end = max(self._end, end)
        return begin

    def free(self, received: int) -> None:
        """Free the first `received` messages, which every reader has received."""
        while self._allocated and self._allocated[0].sequence < received:
            self._allocated.popleft()
        self._shrink()

    def _find_gap(self, size: int) -> int:
        """Return the first offset with `size` free bytes, between messages or behind all of them."""
        begin = self._segment.overflow_at
        for allocation in sorted(self._allocated, key=lambda allocation: allocation.begin):
            if allocation.begin - begin >= size:
                break
            begin = allocation.end
        return begin

    def _shrink(self) -> None:
        """Truncate the file behind the last message."""
        end = max((allocation.end for allocation in self._allocated), default=self._segment.overflow_at)
        if end < self._end:
            os.ftruncate(self._segment.file, end)
            self._end = end
