"""Messages between processes of one machine: a ring in shared memory with one writer and many readers."""

from engine.core.shm.errors import RingClosedError, RingError, RingSpaceError, RingTimeoutError
from engine.core.shm.ring import IMPLEMENTATIONS, Ring, RingHandle, RingReader, RingWriter

__all__ = [
    "IMPLEMENTATIONS",
    "Ring",
    "RingClosedError",
    "RingError",
    "RingHandle",
    "RingReader",
    "RingSpaceError",
    "RingTimeoutError",
    "RingWriter",
]
