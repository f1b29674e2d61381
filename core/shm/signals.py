"""Contract of what a ring's ends wait on: how they learn that there is a message or room, and that the ring has ended.

An implementation owns the control memory of the segment, and nothing in the slots; but its `offer` and `take` may fill
and copy those as ring.py does, where that is faster. Its waits order memory: what the writer stored before `publish` is
seen by a reader whose wait was READY, and what a reader loaded before `advance` was loaded before the writer's wait for
its room was READY.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import ClassVar

from attrs import frozen

from engine.core.shm.segment import Segment

MOST_READERS = 64


class Status(IntEnum):
    """How a wait ended; the same numbers as in _ring.c."""

    READY = 0
    PENDING = 1
    """The time was over, or a signal came."""
    ENDED = 2
    ALONE = 3
    """For the writer: no reader is left. For a reader: it was dropped."""


@frozen
class Spin:
    """How much waits may spin; plain data."""

    us: int
    """Microseconds at the beginning of a wait."""
    announce_us: int
    """Microseconds after an announcement in which a reader may spin."""
    share: float
    """Of the time, which a reader spends so at most, on average."""


class WriterSignals(ABC):
    """The writer's side, for one thread at a time."""

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Messages published."""

    @abstractmethod
    def wait(self, until: int) -> int:
        """Wait until a slot is free, or time.monotonic_ns() is `until`; 0 looks only. Returns a Status."""

    @abstractmethod
    def publish(self) -> None:
        """Slot `sequence` modulo the slots is filled: count it, and wake who sleeps."""

    @abstractmethod
    def announce(self) -> None:
        """The next message will follow soon: wake who sleeps, if the implementation's readers can make use of it."""

    def offer(self, message: bytes) -> bool:
        """Fill a slot and publish it, by one call, if there is room now and the message fits. False: it did not."""
        return False

    @abstractmethod
    def slowest(self) -> int:
        """Messages that every reader not gone has received."""


class ReaderSignals(ABC):
    """One reader's side, for one thread at a time."""

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Messages received."""

    @abstractmethod
    def wait(self, until: int) -> int:
        """Wait until there is a message, or time.monotonic_ns() is `until`; 0 looks only. Returns a Status."""

    def take(self, until: int) -> bytes | None:
        """Wait, copy a slot and give it back, by one call. None: nothing was received; `wait` tells why, which is READY
        where the message must be copied by other means."""
        return None

    @abstractmethod
    def advance(self) -> int:
        """Slot `sequence` modulo the slots is copied: give it back. ALONE: the reader was dropped before that, and the
        copy may be of two messages."""


class Signals(ABC):
    """All sides of one ring, in one process. `drop` and `end` may be called from any thread."""

    implementation: ClassVar[str]

    @classmethod
    @abstractmethod
    def refuses(cls) -> str | None:
        """Why it does not work here, in a sentence; None if it does."""

    @classmethod
    @abstractmethod
    def control_bytes(cls, readers: int) -> int:
        """Of control memory."""

    @classmethod
    @abstractmethod
    def descriptors(cls, readers: int) -> tuple[int, ...]:
        """New descriptors that it needs beside the segment's, not inheritable. Raises RingError."""

    @abstractmethod
    def __init__(self, segment: Segment, readers: int, slots: int, spin: Spin, *, new: bool) -> None:
        """spin: what waits may spend, if the implementation spins at all.
        new: the control memory is zero and to be set up; nobody else has it yet."""

    @abstractmethod
    def writer(self) -> WriterSignals:
        """The writer's side."""

    @abstractmethod
    def reader(self, index: int) -> ReaderSignals:
        """The side of a reader."""

    @abstractmethod
    def drop(self, index: int) -> None:
        """A reader is gone: wake the writer, which waits for it no longer."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether `end` was called, in any process."""

    @abstractmethod
    def end(self) -> None:
        """End the ring, and wake everybody."""
