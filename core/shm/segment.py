"""The shared memory of a ring: a file without a name, freed with the last process that has it open.

    0               identity: magic, token; from REASON on, why the ring ended: length of the text, text
    PAGE            control memory of the signals
    slots           each: size of the message, its offset in the file (0: it follows here), the message
    overflow area   messages longer than a slot, until all readers have received them

The file is in /dev/shm, like POSIX shared memory and accounted as such, with mode 0600. It never has a name
(O_TMPFILE), or, where the file system does not support that, a random name between creation and unlinking. Processes
inherit its descriptor. So nothing is left behind, whichever process dies when, and no other process can find it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.core.shm.errors import RingError, RingSpaceError

PAGE = 4096
REASON = 1024
MAX_REASON_BYTES = 2048
"""Maximum length of the reason."""
SLOT_HEADER = struct.Struct("=QQ")
"""Size of the message; its offset in the file, or 0."""

_IDENTITY = struct.Struct("=8s32s")
_MAGIC = b"ring 1\0\0"
_LENGTH = struct.Struct("=I")
_MIB = 2**20
_NO_TMPFILE = (errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without O_TMPFILE."""


def default_directory() -> Path:
    """Directory of rings' files: POSIX shared memory, or on systems without it (macOS) temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def pages(size: int) -> int:
    """Round `size` up to whole memory pages, bytes."""
    return -(-size // PAGE) * PAGE


class Segment:
    """The file as mapped by one process, and further descriptors of the ring.

    The descriptors are closed when the object is garbage-collected: a thread that still waits keeps it alive.
    """

    def __init__(self, descriptors: Sequence[int], control_bytes: int, slots: int, slot_bytes: int) -> None:
        """descriptors: of the file, then of the signals."""
        self.descriptors = tuple(descriptors)
        self.slot_bytes = slot_bytes
        self.stride = -(-(SLOT_HEADER.size + slot_bytes) // 64) * 64
        """Bytes from one slot to the next."""
        self._slots_at = PAGE + pages(control_bytes)
        self.overflow_at = self._slots_at + pages(slots * self.stride)
        """Offset of the overflow area."""
        self._lock = threading.RLock()

    @property
    def file(self) -> int:
        """Descriptor of the file."""
        return self.descriptors[0]

    def make(self, directory: Path) -> str:
        """Allocate and map the file; return the token that identifies it. Raises RingSpaceError."""
        self._own()
        if free_bytes(directory) < self.overflow_at:
            raise no_space(directory, "a ring of this many and this long slots", self.overflow_at)
        try:
            write(self.file, bytes(self.overflow_at), 0)  # allocates now, so that a later access cannot fail
        except OSError as error:
            raise no_space(directory, "a ring of this many and this long slots", self.overflow_at) from error
        self._map()
        token = secrets.token_hex(16)
        _IDENTITY.pack_into(self.memory, 0, _MAGIC, token.encode())
        return token

    def find(self, token: str) -> None:
        """Map the file that another process has made. Raises RingError for another file."""
        problem = RingError(
            f"descriptor {self.file} is not that of the ring; start the process with the descriptors of the handle "
            "inherited (pass_fds), and attach once"
        )
        try:
            self._map()
        except (OSError, ValueError) as error:
            raise problem from error
        if _IDENTITY.unpack_from(self.memory) != (_MAGIC, token.encode()):
            raise problem
        self._own()

    def _own(self) -> None:
        weakref.finalize(self, _close, self.descriptors).atexit = False

    def _map(self) -> None:
        self.map = mmap.mmap(self.file, self.overflow_at)
        self.memory = memoryview(self.map)

    def slot(self, number: int) -> int:
        """Return the offset of a slot."""
        return self._slots_at + number * self.stride

    def reason(self) -> str:
        """Why the ring has ended; empty if no reason was given."""
        [length] = _LENGTH.unpack_from(self.memory, REASON)
        begin = REASON + _LENGTH.size
        return bytes(self.memory[begin : begin + length]).decode(errors="replace")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock among all processes that map the segment; the kernel releases it if the process dies."""
        with self._lock:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def set_reason(self, reason: str) -> None:
        """Store the reason; the caller holds the lock."""
        text = reason.encode()[:MAX_REASON_BYTES]
        begin = REASON + _LENGTH.size
        self.memory[begin : begin + len(text)] = text
        _LENGTH.pack_into(self.memory, REASON, len(text))


def new_file(directory: Path) -> int:
    """Create a file without a name, not inheritable, mode 0600. Raises RingError."""
    try:
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        path = directory / f"ring-{secrets.token_hex(16)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        path.unlink()
    except OSError as error:
        raise RingError(f"{directory} takes no shared memory ({error}); it must be writable") from error
    return file


def write(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`. Raises OSError when the file system is full."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count


def read(file: int, size: int, offset: int) -> bytes | None:
    """Read `size` bytes; None if the file ends before."""
    data = os.pread(file, size, offset)
    parts = [data]
    missing = size - len(data)
    while missing and data:  # one call reads at most 2 GiB
        data = os.pread(file, missing, offset + size - missing)
        parts.append(data)
        missing -= len(data)
    return None if missing else parts[0] if len(parts) == 1 else b"".join(parts)


def no_space(directory: Path, what: str, needed: int) -> RingSpaceError:
    """Make the error for a file system without room for `needed` bytes."""
    return RingSpaceError(
        f"{what} needs {needed / _MIB:.1f} MiB, and {directory} has {free_bytes(directory) / _MIB:.1f} MiB free; "
        "make it larger (docker run --shm-size; in Kubernetes an emptyDir of medium Memory, mounted there)"
    )


def free_bytes(directory: Path) -> int:
    """Return the free space of a file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
