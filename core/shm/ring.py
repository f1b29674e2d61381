"""A ring in shared memory: one writer, many readers, and every reader receives every message, in order.

The process that makes the ring need be neither: it makes it, starts the others with the descriptors of its handle
inherited, and takes the writer's or a reader's end itself if it wants one.

    ring = Ring.create(readers=2)
    children = [Popen([..., encode(ring.handle), str(i)], pass_fds=ring.handle.descriptors) for i in range(2)]
    writer = ring.writer()
    writer.send(b"step")                      # in child i: Ring.attach(handle).reader(i).receive()
"""

from __future__ import annotations

from attrs import frozen

Buffer = bytes | bytearray | memoryview


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
    token: str
    """Found again at the start of the segment, so that a wrong descriptor is noticed."""


class Ring:
    """A ring as one process maps it. Safe to `interrupt` from any thread; the ends are each for one thread at a time."""

    @classmethod
    def create(
        cls, *, readers: int, slots: int = 16, slot_bytes: int = 65536, spin_us: int = 20, implementation: str = "auto"
    ) -> Ring:
        """A new ring, empty, with no end taken.

        readers: how many there will be, each with an index from 0. A message waits for a reader that has not attached
            yet, in the ring.
        slots, slot_bytes: messages the writer may be ahead of the slowest reader, and bytes of one before it spills to
            the side of the ring (slower, but as long as the shared memory has room).
        spin_us: microseconds a wait may spin before it sleeps; it spins less by itself when waits are long. 0: never.
        implementation: "futex" (Linux, native part built), "pipe" (anywhere, no native part), or "auto": the first
            that works here. `Ring.implementation` tells which.

        Raises RingSpaceError if /dev/shm is too full, RingError if the implementation is not to be had.
        """
        raise NotImplementedError

    @classmethod
    def attach(cls, handle: RingHandle) -> Ring:
        """The ring in a process that inherited the handle's descriptors, which are this Ring's from here on."""
        raise NotImplementedError

    @property
    def handle(self) -> RingHandle:
        """For `attach` in a child."""
        raise NotImplementedError

    @property
    def implementation(self) -> str:
        """Which one it is: "futex" or "pipe"."""
        raise NotImplementedError

    @property
    def closed(self) -> str | None:
        """Why the ring has ended; None while it has not."""
        raise NotImplementedError

    def writer(self) -> RingWriter:
        """The writing end, for one process and once."""
        raise NotImplementedError

    def reader(self, index: int) -> RingReader:
        """The end of reader `index`, for one process and once."""
        raise NotImplementedError

    def drop(self, index: int) -> None:
        """Reader `index` is gone: wait for it no longer. From any thread and process. Alone it does not end the ring:
        the writer's send fails only when no reader is left."""
        raise NotImplementedError

    def interrupt(self, reason: str) -> None:
        """End the ring for all its processes, and wake those that wait. From any thread, any process, at any time; the
        first reason counts. Messages sent before are still received; then, and in send at once, RingClosedError with
        the reason."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the ends this object gave, and give back the mapping. Other processes keep theirs. Twice is no error."""
        raise NotImplementedError


class RingWriter:
    """The writing end."""

    def send(self, message: Buffer, timeout: float | None = None) -> None:
        """Publish a message to all readers at once; blocks while the slowest live reader is a whole ring behind.

        timeout: seconds; None: for ever. Raises RingTimeoutError, RingClosedError, or RingSpaceError for a message longer
        than a slot when the shared memory is full; in each case nothing was sent.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the ring in order: readers receive what was sent, then RingClosedError."""
        raise NotImplementedError


class RingReader:
    """A reading end."""

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message. timeout: seconds; None: for ever. Raises RingTimeoutError, RingClosedError."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether `receive` returns or raises at once; costs about a microsecond and never waits."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave: the writer waits for this reader no longer."""
        raise NotImplementedError
