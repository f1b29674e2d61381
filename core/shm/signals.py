"""Contract of a ring's signalling: how its ends wait for messages, for room and for the end of the ring.

An implementation owns the control memory of the segment and no slot; but its `offer` and `take` may fill and copy
slots, as ring.py does, where that is faster. Waits order memory: a reader whose wait returned READY sees what the
writer stored before `publish`; a reader's loads before `advance` happen before the writer's wait for that slot returns
READY.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import ClassVar, Literal

from attrs import frozen

from engine.core.shm.segment import Segment

MAX_READERS = 64
Implementation = Literal["futex", "pipe"]


class Status(IntEnum):
    """Result of a wait; the same numbers as in _ring.h."""

    READY = 0
    PENDING = 1
    """The wait timed out, or a signal came."""
    ENDED = 2
    ALONE = 3
    """For the writer: no reader is left. For a reader: this reader was dropped."""


@frozen
class Spin:
    """Limits on spinning; plain data."""

    us: int
    """Maximum microseconds of spinning at the beginning of a wait."""
    announce_us: int
    """Microseconds after an announcement during which a reader may spin."""
    share: float
    """Maximum share of the time that a reader spins after announcements, on average."""


class WriterSignals(ABC):
    """Signalling of the writing end, for one thread at a time."""

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Number of messages published."""

    @abstractmethod
    def wait(self, until: int) -> int:
        """Wait until a slot is free or time.monotonic_ns() is `until`; 0 does not wait. Returns a Status."""

    @abstractmethod
    def publish(self) -> None:
        """Publish slot `sequence` modulo the number of slots, which is filled, and wake sleeping readers."""

    @abstractmethod
    def announce(self) -> None:
        """Announce that the next message follows soon: wake sleeping readers, if the implementation's readers spin."""

    def offer(self, message: bytes) -> bool:
        """Fill and publish a slot in one call; return False, without effect, if there is no room or it does not fit."""
        return False

    @abstractmethod
    def slowest(self) -> int:
        """Number of messages that every attached reader has received."""


class ReaderSignals(ABC):
    """Signalling of one reading end, for one thread at a time."""

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Number of messages received."""

    @abstractmethod
    def wait(self, until: int) -> int:
        """Wait until there is a message or time.monotonic_ns() is `until`; 0 does not wait. Returns a Status."""

    def take(self, until: int) -> bytes | None:
        """Wait, copy a slot and free it in one call.

        None: nothing was received; `wait` returns why, READY if the message must be copied by other means.
        """
        return None

    @abstractmethod
    def advance(self) -> int:
        """Free slot `sequence` modulo the number of slots, which is copied.

        Returns ALONE if the reader was dropped before that: the copy may then mix two messages.
        """


class Signals(ABC):
    """Signalling of one ring in one process. `drop` and `end` may be called from any thread."""

    implementation: ClassVar[Implementation]

    @classmethod
    @abstractmethod
    def refuses(cls) -> str | None:
        """Return a sentence that says why it does not work here; None if it does."""

    @classmethod
    @abstractmethod
    def control_bytes(cls, readers: int) -> int:
        """Return the size of the control memory."""

    @classmethod
    @abstractmethod
    def descriptors(cls, readers: int) -> tuple[int, ...]:
        """Create the descriptors it needs besides the segment's, not inheritable. Raises RingError."""

    @abstractmethod
    def __init__(self, segment: Segment, readers: int, slots: int, spin: Spin, *, new: bool) -> None:
        """spin: limits, for an implementation that spins; new: whether to initialize the zeroed control memory, before
        any other process has it."""

    @abstractmethod
    def writer(self) -> WriterSignals:
        """Return the writer's signalling."""

    @abstractmethod
    def reader(self, index: int) -> ReaderSignals:
        """Return the signalling of reader `index`."""

    @abstractmethod
    def drop(self, index: int) -> None:
        """Drop a reader: the writer no longer waits for it."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether `end` was called, in any process."""

    @abstractmethod
    def end(self) -> None:
        """End the ring and wake all its processes."""
