"""Signalling by pipes, in Python only: for systems without futexes and installations without the native part.

A byte in a reader's pipe says that a slot is filled; a byte in the writer's pipe, a reader's index, says that this
reader has copied a slot. The kernel orders memory around both. The byte that says that the ring has ended stays in its
pipe, so that it wakes every process. No wait spins, so announcements do nothing.

If a writer dies while it publishes, some readers receive the message and others do not. With futexes, all readers
receive it or none.
"""

from __future__ import annotations

import os
import select
import time

from engine.core.shm.errors import RingError
from engine.core.shm.segment import PAGE, Segment
from engine.core.shm.signals import MAX_READERS, ReaderSignals, Signals, Spin, Status, WriterSignals

_GONE = 0x80
"""Flag of a byte in the writer's pipe: the reader with this index was dropped."""
_CHUNK = 4096
_MAX_SLOTS = 16000
"""Maximum number of slots times readers; less than the capacity of any system's pipe (macOS: 16384), which leaves room
for the bytes of dropped readers."""


class PipeSignals(Signals):
    """Signals of rings on any system.

    Control memory: one byte per possible reader, 1 if dropped; then one byte, 1 if the ring has ended.
    """

    implementation = "pipe"

    @classmethod
    def refuses(cls) -> str | None:
        return None

    @classmethod
    def control_bytes(cls, readers: int) -> int:
        return MAX_READERS + 1

    @classmethod
    def descriptors(cls, readers: int) -> tuple[int, ...]:
        """Create pipes, two descriptors each: for the end of the ring, for the writer, for each reader."""
        made: list[int] = []
        try:
            for _ in range(2 + readers):
                made += os.pipe()
        except OSError as error:
            for descriptor in made:
                os.close(descriptor)
            raise RingError(
                f"a ring for {readers} readers needs {2 + readers} pipes ({error}); raise ulimit -n"
            ) from error
        for descriptor in made:
            os.set_blocking(descriptor, False)
        return tuple(made)

    def __init__(self, segment: Segment, readers: int, slots: int, spin: Spin, *, new: bool) -> None:
        if slots * readers > _MAX_SLOTS:
            raise RingError(
                f"a ring of pipes takes at most {_MAX_SLOTS} slots times readers, not {slots} times {readers}; "
                "use fewer slots"
            )
        self.segment = segment
        self.readers = readers
        self.slots = slots
        _, self.ended_pipe, self._end_pipe, self.freed_pipe, self._free_pipe, *pipes = segment.descriptors
        self.filled_pipes, self._fill_pipes = pipes[::2], pipes[1::2]

    def writer(self) -> WriterSignals:
        return _Writer(self)

    def reader(self, index: int) -> ReaderSignals:
        return _Reader(self, index)

    def drop(self, index: int) -> None:
        with self.segment.lock():
            self.segment.memory[PAGE + index] = 1
            os.write(self._free_pipe, bytes([_GONE | index]))
            self.fill(index)  # wakes the reader if it is alive

    def gone(self, index: int) -> bool:
        """Whether a reader was dropped."""
        return self.segment.memory[PAGE + index] == 1

    def fill(self, index: int) -> None:
        """Signal a filled slot to a reader."""
        os.write(self._fill_pipes[index], b"\0")

    def free(self, index: int) -> None:
        """Signal to the writer that a reader has copied a slot."""
        os.write(self._free_pipe, bytes([index]))

    def ended(self) -> bool:
        return self.segment.memory[PAGE + MAX_READERS] == 1

    def end(self) -> None:
        with self.segment.lock():
            if not self.ended():
                os.write(self._end_pipe, b"\0")
                self.segment.memory[PAGE + MAX_READERS] = 1


class _Waiter:
    """Sleeps until a pipe has something to read, or the ring ends."""

    def __init__(self, pipe: int, ended_pipe: int) -> None:
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._poll.register(ended_pipe, select.POLLIN)

    def sleep(self, until: int) -> bool:
        """Sleep until there is a byte or time.monotonic_ns() is `until`; return False if that is past."""
        left = until - time.monotonic_ns()
        if left <= 0:
            return False
        self._poll.poll(-(-left // 1_000_000))
        return True

    def take(self) -> bytes:
        """Read all bytes of the pipe."""
        try:
            return os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return b""


class _Writer(WriterSignals):
    def __init__(self, signals: PipeSignals) -> None:
        self._sequence = 0
        self._signals = signals
        self._waiter = _Waiter(signals.freed_pipe, signals.ended_pipe)
        self._received = dict.fromkeys(range(signals.readers), 0)
        """Attached reader -> number of messages it has copied."""

    @property
    def sequence(self) -> int:
        return self._sequence

    def _look(self) -> Status:
        if self._signals.ended():
            return Status.ENDED
        for byte in self._waiter.take():
            if byte & _GONE:
                self._received.pop(byte & ~_GONE, None)
            elif byte in self._received:
                self._received[byte] += 1
        if not self._received:
            return Status.ALONE
        return Status.READY if self._sequence - self.slowest() < self._signals.slots else Status.PENDING

    def wait(self, until: int) -> int:
        while (found := self._look()) == Status.PENDING and self._waiter.sleep(until):
            pass
        return found

    def publish(self) -> None:
        self._sequence += 1
        for index in self._received:
            self._signals.fill(index)

    def announce(self) -> None:
        """Do nothing: no wait spins."""

    def slowest(self) -> int:
        return min(self._received.values(), default=self._sequence)


class _Reader(ReaderSignals):
    def __init__(self, signals: PipeSignals, index: int) -> None:
        self._sequence = 0
        self._signals = signals
        self._index = index
        self._waiter = _Waiter(signals.filled_pipes[index], signals.ended_pipe)
        self._filled = 0
        """Number of filled slots that are not copied."""

    @property
    def sequence(self) -> int:
        return self._sequence

    def _look(self) -> Status:
        """Return the status; tests the end before the pipe, so that messages sent before the end are received."""
        ended = self._signals.ended()
        if not self._filled:
            self._filled += len(self._waiter.take())
        if self._signals.gone(self._index):
            return Status.ALONE
        if self._filled:
            return Status.READY
        return Status.ENDED if ended else Status.PENDING

    def wait(self, until: int) -> int:
        while (found := self._look()) == Status.PENDING and self._waiter.sleep(until):
            pass
        return found

    def advance(self) -> int:
        if self._signals.gone(self._index):
            return Status.ALONE
        self._sequence += 1
        self._filled -= 1
        self._signals.free(self._index)
        return Status.READY
