"""Signals by pipes, in Python alone: for systems without futexes, and installations without a native part.

A byte in the pipe of a reader says that a slot is filled; a byte in the writer's pipe, the reader's index, that this
reader has copied one. The kernel orders memory around both. Nobody ever takes the byte out of the pipe that says that
the ring has ended, so that it wakes everybody. No wait spins, so that announcements do nothing.

A writer that dies while it publishes has told some readers and others not: these may receive one message more than
those. With futexes, all receive it or none.
"""

from __future__ import annotations

import os
import select
import time

from engine.core.shm.errors import RingError
from engine.core.shm.segment import PAGE, Segment
from engine.core.shm.signals import MOST_READERS, ReaderSignals, Signals, Spin, Status, WriterSignals

_GONE = 0x80
"""Added to the index of a reader in the writer's pipe: it is gone."""
_CHUNK = 4096
_MOST_BYTES = 16000
"""Of slots; a little less than what every system's pipe holds (macOS: 16384), so that there is room to drop readers."""


class PipeSignals(Signals):
    """Of rings anywhere.

    Control memory: a byte for each possible reader, 1 if it is gone; behind them one for the ring, 1 if it has ended.
    """

    implementation = "pipe"

    @classmethod
    def refuses(cls) -> str | None:
        """Nothing."""
        return None

    @classmethod
    def control_bytes(cls, readers: int) -> int:
        """See Signals."""
        return MOST_READERS + 1

    @classmethod
    def descriptors(cls, readers: int) -> tuple[int, ...]:
        """Pipes, reading end and writing end of each: the end of the ring, the writer's, the readers'."""
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
        if slots * readers > _MOST_BYTES:
            raise RingError(
                f"a ring of pipes takes at most {_MOST_BYTES} slots times readers, not {slots} times {readers}; "
                "use fewer slots"
            )
        self.segment = segment
        self.readers = readers
        self.slots = slots
        _, self.ended_pipe, self._end_pipe, self.freed_pipe, self._free_pipe, *pipes = segment.descriptors
        self.filled_pipes, self._fill_pipes = pipes[::2], pipes[1::2]

    def writer(self) -> WriterSignals:
        """See Signals."""
        return _Writer(self)

    def reader(self, index: int) -> ReaderSignals:
        """See Signals."""
        return _Reader(self, index)

    def drop(self, index: int) -> None:
        """See Signals."""
        with self.segment.lock():
            self.segment.memory[PAGE + index] = 1
            os.write(self._free_pipe, bytes([_GONE | index]))
            self.fill(index)  # wakes the reader itself, should it live

    def gone(self, index: int) -> bool:
        """Whether a reader was dropped."""
        return self.segment.memory[PAGE + index] == 1

    def fill(self, index: int) -> None:
        """Tell a reader of a slot."""
        os.write(self._fill_pipes[index], b"\0")

    def free(self, index: int) -> None:
        """Tell the writer of a slot that a reader has copied."""
        os.write(self._free_pipe, bytes([index]))

    def ended(self) -> bool:
        """See Signals."""
        return self.segment.memory[PAGE + MOST_READERS] == 1

    def end(self) -> None:
        """See Signals."""
        with self.segment.lock():
            if not self.ended():
                os.write(self._end_pipe, b"\0")
                self.segment.memory[PAGE + MOST_READERS] = 1


class _Waiter:
    """Sleeps until a pipe has something to read, or the ring ends."""

    def __init__(self, pipe: int, ended_pipe: int) -> None:
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._poll.register(ended_pipe, select.POLLIN)

    def sleep(self, until: int) -> bool:
        """Until time.monotonic_ns() is `until`; False if it is already."""
        left = until - time.monotonic_ns()
        if left <= 0:
            return False
        self._poll.poll(-(-left // 1_000_000))
        return True

    def take(self) -> bytes:
        """What the pipe holds."""
        try:
            return os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return b""


class _Writer(WriterSignals):
    """See WriterSignals."""

    def __init__(self, signals: PipeSignals) -> None:
        self._sequence = 0
        self._signals = signals
        self._waiter = _Waiter(signals.freed_pipe, signals.ended_pipe)
        self._received = dict.fromkeys(range(signals.readers), 0)
        """Reader not gone -> messages it has copied."""

    @property
    def sequence(self) -> int:
        """See WriterSignals."""
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
        """See WriterSignals."""
        while (found := self._look()) == Status.PENDING and self._waiter.sleep(until):
            pass
        return found

    def publish(self) -> None:
        """See WriterSignals."""
        self._sequence += 1
        for index in self._received:
            self._signals.fill(index)

    def announce(self) -> None:
        """See WriterSignals. Nothing: no wait spins."""

    def slowest(self) -> int:
        """See WriterSignals."""
        return min(self._received.values(), default=self._sequence)


class _Reader(ReaderSignals):
    """See ReaderSignals."""

    def __init__(self, signals: PipeSignals, index: int) -> None:
        self._sequence = 0
        self._signals = signals
        self._index = index
        self._waiter = _Waiter(signals.filled_pipes[index], signals.ended_pipe)
        self._filled = 0
        """Slots that may be copied."""

    @property
    def sequence(self) -> int:
        """See ReaderSignals."""
        return self._sequence

    def _look(self) -> Status:
        """The end is looked at before the pipe: what was sent before it is received."""
        ended = self._signals.ended()
        if not self._filled:
            self._filled += len(self._waiter.take())
        if self._signals.gone(self._index):
            return Status.ALONE
        if self._filled:
            return Status.READY
        return Status.ENDED if ended else Status.PENDING

    def wait(self, until: int) -> int:
        """See ReaderSignals."""
        while (found := self._look()) == Status.PENDING and self._waiter.sleep(until):
            pass
        return found

    def advance(self) -> int:
        """See ReaderSignals."""
        if self._signals.gone(self._index):
            return Status.ALONE
        self._sequence += 1
        self._filled -= 1
        self._signals.free(self._index)
        return Status.READY
