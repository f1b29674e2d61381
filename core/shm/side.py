"""Messages too long for a slot: where they lie in the file, behind the slots. The writer alone decides it."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from attrs import frozen

from engine.core.shm.segment import Segment, no_space, pages, write


@frozen
class _Stretch:
    """Of the file, taken by message number `sequence`."""

    sequence: int
    begin: int
    end: int


class Side:
    """The file grows for long messages, and shrinks when all readers have them: what is not used takes no memory.

    They are written and read by system calls, not through a mapping: a full file system is an error then, and not a
    signal that kills the process.
    """

    def __init__(self, segment: Segment, directory: Path) -> None:
        self._segment = segment
        self._directory = directory
        self._taken: deque[_Stretch] = deque()
        self._end = segment.side_at

    @property
    def in_use(self) -> bool:
        """Whether it takes memory."""
        return self._end > self._segment.side_at

    def put(self, message: memoryview, sequence: int) -> int:
        """Keep a message; returns its offset. Raises RingSpaceError, and keeps nothing then."""
        begin = self._gap(pages(len(message)))
        end = begin + pages(len(message))
        try:
            write(self._segment.file, message, begin)
        except OSError as error:
            self._end = max(self._end, end)
            self._shrink()
            raise no_space(self._directory, "a message longer than a slot", len(message)) from error
        self._taken.append(_Stretch(sequence, begin, end))
        self._end = max(self._end, end)
        return begin

    def free(self, received: int) -> None:
        """Every reader has the first `received` messages."""
        while self._taken and self._taken[0].sequence < received:
            self._taken.popleft()
        self._shrink()

    def _gap(self, size: int) -> int:
        """The first place of so many bytes between messages, or behind all."""
        begin = self._segment.side_at
        for stretch in sorted(self._taken, key=lambda stretch: stretch.begin):
            if stretch.begin - begin >= size:
                break
            begin = stretch.end
        return begin

    def _shrink(self) -> None:
        end = max((stretch.end for stretch in self._taken), default=self._segment.side_at)
        if end < self._end:
            os.ftruncate(self._segment.file, end)
            self._end = end
