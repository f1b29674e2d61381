"""A ring in shared memory: one writer, many readers, and every reader receives every message, in order.

Any process may create the ring. It starts the others with the descriptors of the ring's handle inherited, and may be
the writer or a reader itself:

    ring = Ring.create(readers=2)
    children = [Popen([..., encode(ring.handle), str(i)], pass_fds=ring.handle.descriptors) for i in range(2)]
    ring.writer().send(b"step")                # in child i: Ring.attach(handle).reader(i).receive()

The ring does not notice that a process has died. The code that watches the processes calls `interrupt`, or `drop` for
a reader that the others do not need; either ends the waits for that process.
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
from engine.core.shm.overflow import OverflowArea
from engine.core.shm.pipe import PipeSignals
from engine.core.shm.segment import SLOT_HEADER, Segment, default_directory, new_file, read
from engine.core.shm.signals import MAX_READERS, Implementation, ReaderSignals, Signals, Spin, Status, WriterSignals
from engine.core.shm.waits import SLICE, end_of, wait

Buffer = bytes | bytearray | memoryview

IMPLEMENTATIONS: tuple[type[Signals], ...] = (FutexSignals, PipeSignals)
"""In order of preference for "auto"."""


@frozen(kw_only=True)
class RingHandle:
    """What a process needs to attach: plain data that can be sent as an argument or a message."""

    implementation: Implementation
    descriptors: tuple[int, ...]
    """Descriptors to inherit under the same numbers: `Popen(..., pass_fds=handle.descriptors)`."""
    readers: int
    slots: int
    slot_bytes: int
    spin_us: int
    announce_us: int
    spin_share: float
    directory: str
    """Directory of the ring's file."""
    token: str
    """Also at the start of the segment, so that a wrong descriptor is detected."""


def choose(implementation: str = "auto") -> type[Signals]:
    """Return the implementation of this name, or for "auto" the first that works here. Raises RingError."""
    if implementation == "auto":
        return next(one for one in IMPLEMENTATIONS if one.refuses() is None)
    known: dict[str, type[Signals]] = {one.implementation: one for one in IMPLEMENTATIONS}
    if implementation not in known:
        raise RingError(f"there are no rings of {implementation!r}; use auto, {' or '.join(known)}")
    refused = known[implementation].refuses()
    if refused is not None:
        raise RingError(f"there can be no ring of {implementation!r} here: {refused}")
    return known[implementation]


class Ring:
    """A ring as attached in one process. Methods are thread-safe; each end is for one thread at a time."""

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
        """Create an empty ring.

        readers: number of readers, with indices from 0. Messages wait in the ring for readers that are not attached.
        slots: maximum number of messages by which the writer may be ahead of the slowest reader.
        slot_bytes: size of a slot; longer messages go to the overflow area (slower, limited by free shared memory).
        spin_us: maximum microseconds that a wait spins before it sleeps; waits spin less after long waits. 0: never.
        announce_us: microseconds after an announcement (`RingWriter.announce`) during which a reader spins for the
            message before it sleeps again. 0: announcements are ignored, as by rings of pipes.
        spin_share: maximum share of the time, in [0, 1], that a reader spins after announcements, on average; further
            announcements are ignored. 0: all are.
        implementation: "futex" (Linux, native part built), "pipe" (any system, no native part), or "auto": the first
            that works here. `Ring.implementation` says which.
        directory: directory of the ring's file; None: /dev/shm, or on systems without it temporary files.

        Raises RingSpaceError if there is no room, RingError if the implementation does not work here.
        """
        for name, value, limit in (
            ("readers", readers, MAX_READERS),
            ("slots", slots, 2**20),
            ("slot_bytes", slot_bytes, 2**30),
        ):
            if not 1 <= value <= limit:
                raise RingError(f"{name} must be in [1, {limit}], not {value}")
        for name, value in (("spin_us", spin_us), ("announce_us", announce_us)):
            if not 0 <= value <= 10**6:
                raise RingError(f"{name} must be in [0, 1000000] microseconds, not {value}")
        if not 0 <= spin_share <= 1:
            raise RingError(f"spin_share must be in [0, 1], not {spin_share}")
        kind = choose(implementation)
        directory = directory or default_directory()
        signal_descriptors = kind.descriptors(readers)
        try:
            descriptors = (new_file(directory), *signal_descriptors)
        except RingError:
            for descriptor in signal_descriptors:
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
        """Attach to a ring in a process that inherited the handle's descriptors, and take ownership of them.

        Raises RingError if the descriptors were not inherited.
        """
        kind = choose(handle.implementation)
        segment = Segment(handle.descriptors, kind.control_bytes(handle.readers), handle.slots, handle.slot_bytes)
        segment.find(handle.token)
        return cls(handle, segment, kind(segment, handle.readers, handle.slots, _spin(handle), new=False))

    def __init__(self, handle: RingHandle, segment: Segment, signals: Signals) -> None:
        """Called by `create` and `attach`."""
        self.handle = handle
        """For `attach` in another process."""
        self._segment = segment
        self._signals = signals
        self._ends: list[RingWriter | RingReader] = []

    @property
    def implementation(self) -> str:
        """Which implementation the ring has: "futex" or "pipe"."""
        return self.handle.implementation

    @property
    def closed(self) -> str | None:
        """Why the ring has ended; None while it has not."""
        return self._segment.reason() if self._signals.ended() else None

    def writer(self) -> RingWriter:
        """Return the writing end; one process may call this once."""
        writer = RingWriter(self, self._segment, self._signals.writer())
        self._ends.append(writer)
        return writer

    def reader(self, index: int) -> RingReader:
        """Return the end of reader `index`; one process may call this once per index."""
        self._check(index)
        reader = RingReader(self, self._segment, self._signals.reader(index), index)
        self._ends.append(reader)
        return reader

    def drop(self, index: int) -> None:
        """Drop reader `index`: the writer no longer waits for it. May be called in any process.

        The ring continues; `send` fails only when no reader is left.
        """
        self._check(index)
        self._signals.drop(index)

    def interrupt(self, reason: str) -> None:
        """End the ring for all its processes and wake all waits. May be called in any process; the first reason counts.

        Readers still receive messages sent before, then get RingClosedError with the reason; `send` raises it
        immediately. A message being sent meanwhile is received by all, some or no readers.
        """
        with self._segment.lock():
            if not self._signals.ended():
                self._segment.set_reason(reason)
                self._signals.end()

    def close(self) -> None:
        """Close the ends that this object returned. The memory is freed with the last reference to ring and ends.

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
        """Called by `Ring.writer`."""
        self._ring = ring
        self._segment = segment
        self._signals = signals
        self._overflow = OverflowArea(segment, Path(ring.handle.directory))

    def send(self, message: Buffer, timeout: float | None = None) -> None:
        """Publish a message to all readers; blocks while the slowest reader is a whole ring (`slots`) behind.

        timeout: seconds; None: no timeout. Raises RingTimeoutError, RingClosedError, or RingSpaceError for a message
        longer than a slot when the shared memory is full; after any of these nothing was sent.
        """
        if isinstance(message, bytes) and not self._overflow.in_use and self._signals.offer(message):
            return
        data = memoryview(message).cast("B")
        found = wait(self._signals.wait, end_of(timeout), timeout)
        if found != Status.READY:
            raise RingClosedError("no reader is left" if found == Status.ALONE else self._ring.closed)
        if self._overflow.in_use:
            self._overflow.free(self._signals.slowest())
        sequence = self._signals.sequence
        begin = self._segment.slot(sequence % self._ring.handle.slots)
        memory = self._segment.memory
        if len(data) <= self._segment.slot_bytes:
            SLOT_HEADER.pack_into(memory, begin, len(data), 0)
            memory[begin + SLOT_HEADER.size : begin + SLOT_HEADER.size + len(data)] = data
        else:
            SLOT_HEADER.pack_into(memory, begin, len(data), self._overflow.put(data, sequence))
        self._signals.publish()

    def announce(self) -> None:
        """Announce that a message follows soon: sleeping readers wake and spin for it, which saves the time to wake.

        Useful if the message follows within `announce_us`, but not much sooner than a process takes to wake. If the
        message comes later or never, readers go back to sleep. Never blocks. Has no effect on a ring that has ended, on
        rings of pipes, or if announcements are ignored (see `Ring.create`).
        """
        self._signals.announce()

    def close(self) -> None:
        """End the ring: readers receive what was sent, then get RingClosedError."""
        self._ring.interrupt("its writer has closed it")


class RingReader:
    """A reading end, for one thread at a time."""

    def __init__(self, ring: Ring, segment: Segment, signals: ReaderSignals, index: int) -> None:
        """Called by `Ring.reader`."""
        self._ring = ring
        self._segment = segment
        self._signals = signals
        self._index = index

    def receive(self, timeout: float | None = None) -> bytes:
        """Receive the next message. timeout: seconds; None: no timeout. Raises RingTimeoutError, RingClosedError."""
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
        """Whether `receive` returns or raises without waiting."""
        return self._signals.wait(0) != Status.PENDING

    def close(self) -> None:
        """Detach: the writer no longer waits for this reader."""
        self._ring.drop(self._index)


def _spin(handle: RingHandle) -> Spin:
    return Spin(us=handle.spin_us, announce_us=handle.announce_us, share=handle.spin_share)
