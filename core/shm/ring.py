"""A ring in shared memory: one writer, many readers, and every reader receives every message, in order.

The process that makes the ring need be neither. It starts the others with the descriptors of the ring's handle
inherited, and takes the writer's or a reader's end itself if it wants one:

    ring = Ring.create(readers=2)
    children = [Popen([..., encode(ring.handle), str(i)], pass_fds=ring.handle.descriptors) for i in range(2)]
    ring.writer().send(b"step")                # in child i: Ring.attach(handle).reader(i).receive()

A process that dies is not noticed by the ring itself: whoever watches the processes calls `interrupt`, or `drop` for a
reader that the others can do without. Either ends the wait of those who waited for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from attrs import frozen

from engine.core.shm.errors import RingClosedError, RingError
from engine.core.shm.futex import FutexSignals
from engine.core.shm.pipe import PipeSignals
from engine.core.shm.segment import SLOT_HEADER, Segment, default_directory, new_file, read
from engine.core.shm.side import Side
from engine.core.shm.signals import MOST_READERS, ReaderSignals, Signals, Spin, Status, WriterSignals
from engine.core.shm.waits import SLICE, end_of, wait

Buffer = bytes | bytearray | memoryview

IMPLEMENTATIONS: tuple[type[Signals], ...] = (FutexSignals, PipeSignals)
"""The first that works is the one for "auto"."""


@frozen(kw_only=True)
class RingHandle:
    """What a process needs to attach: plain data, which may travel in an argument or a message."""

    implementation: str
    """"futex" or "pipe"."""
    descriptors: tuple[int, ...]
    """To be inherited under the same numbers: `Popen(..., pass_fds=handle.descriptors)`."""
    readers: int
    slots: int
    slot_bytes: int
    spin_us: int
    announce_us: int
    spin_share: float
    directory: str
    """Where the shared memory is taken from."""
    token: str
    """Found again at the start of the segment, so that a wrong descriptor is noticed."""


def choose(implementation: str = "auto") -> type[Signals]:
    """The implementation of that name, or for "auto" the first that works here. Raises RingError."""
    if implementation == "auto":
        return next(one for one in IMPLEMENTATIONS if one.refuses() is None)
    known = {one.implementation: one for one in IMPLEMENTATIONS}
    if implementation not in known:
        raise RingError(f"there are no rings of {implementation!r}; use auto, {' or '.join(known)}")
    refused = known[implementation].refuses()
    if refused is not None:
        raise RingError(f"there can be no ring of {implementation!r} here: {refused}")
    return known[implementation]


class Ring:
    """A ring as one process has it. Its methods may be called from any thread; each end is for one at a time."""

    @classmethod
    def create(
        cls,
        *,
        readers: int,
        slots: int = 16,
        slot_bytes: int = 65536,
        spin_us: int = 20,
        announce_us: int = 400,
        spin_share: float = 0.09,
        implementation: str = "auto",
        directory: Path | None = None,
    ) -> Ring:
        """A new ring, empty, with no end taken.

        readers: how many there will be, each with an index from 0. Messages wait in the ring for one that has not
            attached yet.
        slots, slot_bytes: messages the writer may be ahead of the slowest reader, and bytes of one before it spills to
            the side of the ring (slower, but as long as the shared memory has room).
        spin_us: microseconds a wait may spin before it sleeps; it spins less by itself when waits are long. 0: never.
        announce_us: microseconds after an announcement (`RingWriter.announce`) in which a reader spins for the
            message, before it sleeps again. 0: announcements are ignored, as they are by rings of pipes.
        spin_share: part of the time, in [0, 1], that a reader spends on that at most, on average; announcements beyond
            that are ignored. 0: all are.
        implementation: "futex" (Linux, native part built), "pipe" (anywhere, no native part), or "auto": the first
            that works here. `Ring.implementation` tells which.
        directory: where the file of the shared memory lies; None: /dev/shm, or where there is none, temporary files.

        Raises RingSpaceError if that is too full, RingError if the implementation is not to be had.
        """
        for name, value, most in (
            ("readers", readers, MOST_READERS),
            ("slots", slots, 2**20),
            ("slot_bytes", slot_bytes, 2**30),
        ):
            if not 1 <= value <= most:
                raise RingError(f"{name} must be in [1, {most}], not {value}")
        for name, value in (("spin_us", spin_us), ("announce_us", announce_us)):
            if not 0 <= value <= 10**6:
                raise RingError(f"{name} must be in [0, 1000000] microseconds, not {value}")
        if not 0 <= spin_share <= 1:
            raise RingError(f"spin_share must be in [0, 1], not {spin_share}")
        kind = choose(implementation)
        directory = directory or default_directory()
        beside = kind.descriptors(readers)
        try:
            descriptors = (new_file(directory), *beside)
        except RingError:
            for descriptor in beside:
                os.close(descriptor)
            raise
        segment = Segment(descriptors, kind.control_bytes(readers), slots, slot_bytes)
        token = segment.make(directory)
        handle = RingHandle(
            implementation=kind.implementation,
            descriptors=descriptors,
            readers=readers,
            slots=slots,
            slot_bytes=slot_bytes,
            spin_us=spin_us,
            announce_us=announce_us,
            spin_share=spin_share,
            directory=str(directory),
            token=token,
        )
        return cls(handle, segment, kind(segment, readers, slots, _spin(handle), new=True))

    @classmethod
    def attach(cls, handle: RingHandle) -> Ring:
        """The ring in a process that inherited the handle's descriptors, which are this object's from here on.

        Raises RingError if they were not inherited.
        """
        kind = choose(handle.implementation)
        segment = Segment(handle.descriptors, kind.control_bytes(handle.readers), handle.slots, handle.slot_bytes)
        segment.find(handle.token)
        return cls(handle, segment, kind(segment, handle.readers, handle.slots, _spin(handle), new=False))

    def __init__(self, handle: RingHandle, segment: Segment, signals: Signals) -> None:
        """Made by `create` and `attach`."""
        self.handle = handle
        """For `attach` in another process."""
        self._segment = segment
        self._signals = signals
        self._ends: list[RingWriter | RingReader] = []

    @property
    def implementation(self) -> str:
        """Which one it is: "futex" or "pipe"."""
        return self.handle.implementation

    @property
    def closed(self) -> str | None:
        """Why the ring has ended; None while it has not."""
        return self._segment.reason() if self._signals.ended() else None

    def writer(self) -> RingWriter:
        """The writing end: for one process, once."""
        writer = RingWriter(self, self._segment, self._signals.writer())
        self._ends.append(writer)
        return writer

    def reader(self, index: int) -> RingReader:
        """The end of reader `index`: for one process, once."""
        self._check(index)
        reader = RingReader(self, self._segment, self._signals.reader(index), index)
        self._ends.append(reader)
        return reader

    def drop(self, index: int) -> None:
        """Reader `index` is gone: the writer waits for it no longer. From any process.

        The ring goes on: `send` fails only when no reader is left.
        """
        self._check(index)
        self._signals.drop(index)

    def interrupt(self, reason: str) -> None:
        """End the ring for all its processes and wake those that wait. From any process; the first reason counts.

        Messages sent before are still received, and one that is being sent by all, some or no readers; then, and from
        `send` at once, comes RingClosedError with the reason.
        """
        with self._segment.lock():
            if not self._signals.ended():
                self._segment.set_reason(reason)
                self._signals.end()

    def close(self) -> None:
        """Close the ends that this object gave. The memory is given back when nobody refers to it and them any more.

        Other processes keep theirs. A second call does nothing.
        """
        while self._ends:
            self._ends.pop().close()

    def _check(self, index: int) -> None:
        if not 0 <= index < self.handle.readers:
            raise RingError(f"there is no reader {index}; the ring was made for {self.handle.readers}, from 0 on")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RingWriter:
    """The writing end, for one thread at a time."""

    def __init__(self, ring: Ring, segment: Segment, signals: WriterSignals) -> None:
        """Made by `Ring.writer`."""
        self._ring = ring
        self._segment = segment
        self._signals = signals
        self._side = Side(segment, Path(ring.handle.directory))

    def send(self, message: Buffer, timeout: float | None = None) -> None:
        """Publish a message to all readers at once; blocks while the slowest live reader is a whole ring behind.

        timeout: seconds; None: for ever. Raises RingTimeoutError, RingClosedError, or RingSpaceError for a message
        longer than a slot when the shared memory is full; in each case nothing was sent.
        """
        if isinstance(message, bytes) and not self._side.in_use and self._signals.offer(message):
            return
        data = memoryview(message).cast("B")
        found = wait(self._signals.wait, end_of(timeout), timeout)
        if found != Status.READY:
            raise RingClosedError("no reader is left" if found == Status.ALONE else self._ring.closed)
        if self._side.in_use:
            self._side.free(self._signals.slowest())
        sequence = self._signals.sequence
        begin = self._segment.slot(sequence % self._ring.handle.slots)
        memory = self._segment.memory
        if len(data) <= self._segment.slot_bytes:
            SLOT_HEADER.pack_into(memory, begin, len(data), 0)
            memory[begin + SLOT_HEADER.size : begin + SLOT_HEADER.size + len(data)] = data
        else:
            SLOT_HEADER.pack_into(memory, begin, len(data), self._side.put(data, sequence))
        self._signals.publish()

    def announce(self) -> None:
        """A message will follow soon: readers that sleep wake, and spin for it a while, so that they have it at once.

        Worth it where the message follows in less than `announce_us`, and not much sooner than a sleeper takes to wake.
        It may follow later, or never: readers go back to sleep. Never blocks, and does nothing on a ring that has
        ended, on rings of pipes, or if announcements are ignored (see `Ring.create`).
        """
        self._signals.announce()

    def close(self) -> None:
        """End the ring in order: readers receive what was sent, then RingClosedError."""
        self._ring.interrupt("its writer has closed it")


class RingReader:
    """A reading end, for one thread at a time."""

    def __init__(self, ring: Ring, segment: Segment, signals: ReaderSignals, index: int) -> None:
        """Made by `Ring.reader`."""
        self._ring = ring
        self._segment = segment
        self._signals = signals
        self._index = index

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message. timeout: seconds; None: for ever. Raises RingTimeoutError, RingClosedError."""
        end = end_of(timeout)
        taken = self._signals.take(min(end, time.monotonic_ns() + SLICE))
        if taken is not None:
            return taken
        found = wait(self._signals.wait, end, timeout)
        if found == Status.READY:
            begin = self._segment.slot(self._signals.sequence % self._ring.handle.slots)
            size, offset = SLOT_HEADER.unpack_from(self._segment.memory, begin)
            begin += SLOT_HEADER.size
            if offset:
                message = read(self._segment.file, size, offset)
            else:
                message = bytes(self._segment.memory[begin : begin + size])
            found = self._signals.advance()
            if found == Status.READY:
                if message is None:
                    raise RingError("a message is missing from the shared memory; something else has written there")
                return message
        raise RingClosedError(
            f"reader {self._index} has left or was dropped" if found == Status.ALONE else self._ring.closed
        )

    def ready(self) -> bool:
        """Whether `receive` returns or raises at once. Never waits."""
        return self._signals.wait(0) != Status.PENDING

    def close(self) -> None:
        """Leave: the writer waits for this reader no longer."""
        self._ring.drop(self._index)


def _spin(handle: RingHandle) -> Spin:
    return Spin(us=handle.spin_us, announce_us=handle.announce_us, share=handle.spin_share)
