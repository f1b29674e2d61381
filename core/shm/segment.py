"""The shared memory of a ring: a file without a name, which is gone with the last process that has it open.

    0               identity: magic, token; from REASON on, why the ring ended: bytes of text, text
    PAGE            control memory of the signals
    slots           each: bytes of the message, its offset in the file (0: it follows here), the message
    side            messages too long for a slot, while somebody has to read them

The file lies in /dev/shm, where POSIX shared memory lies and is accounted for, mode 0600. It has no name from the start
(O_TMPFILE), or where that is not to be had, a random one for the moment between making and unlinking it. Processes
inherit its descriptor. So nothing remains, whoever dies when, and nobody else can find it.
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
MOST_REASON = 2048
"""Bytes of text."""
SLOT_HEADER = struct.Struct("=QQ")
"""Bytes of the message; its offset in the file, or 0."""

_IDENTITY = struct.Struct("=8s32s")
_MAGIC = b"ring 1\0\0"
_LENGTH = struct.Struct("=I")
_MIB = 2**20
_NO_TMPFILE = (errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems without O_TMPFILE answer."""


def default_directory() -> Path:
    """Where the file of a ring lies: POSIX shared memory, or where there is none (macOS), temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def pages(size: int) -> int:
    """Bytes of the whole pages that hold `size` bytes."""
    return -(-size // PAGE) * PAGE


class Segment:
    """The file as one process maps it, and further descriptors that go with it.

    It closes them when nobody refers to it any more: a thread that still waits keeps it alive.
    """

    def __init__(self, descriptors: Sequence[int], control_bytes: int, slots: int, slot_bytes: int) -> None:
        """descriptors: the file's, and those to keep beside it."""
        self.descriptors = tuple(descriptors)
        self.slot_bytes = slot_bytes
        self.stride = -(-(SLOT_HEADER.size + slot_bytes) // 64) * 64
        """Bytes from one slot to the next."""
        self._slots_at = PAGE + pages(control_bytes)
        self.side_at = self._slots_at + pages(slots * self.stride)
        """Offset of the side."""
        self._lock = threading.RLock()

    @property
    def file(self) -> int:
        """Descriptor of the file."""
        return self.descriptors[0]

    def make(self, directory: Path) -> str:
        """Give the file its memory, map it, and return the token that marks it. Raises RingSpaceError."""
        self._own()
        if free_bytes(directory) < self.side_at:
            raise no_space(directory, "a ring of this many and this long slots", self.side_at)
        try:
            write(self.file, bytes(self.side_at), 0)  # takes the memory now: touching it later cannot fail
        except OSError as error:
            raise no_space(directory, "a ring of this many and this long slots", self.side_at) from error
        self._map()
        token = secrets.token_hex(16)
        _IDENTITY.pack_into(self.memory, 0, _MAGIC, token.encode())
        return token

    def find(self, token: str) -> None:
        """Map what another process has made. Raises RingError if it is something else."""
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
        self.map = mmap.mmap(self.file, self.side_at)
        self.memory = memoryview(self.map)

    def slot(self, number: int) -> int:
        """Offset of a slot."""
        return self._slots_at + number * self.stride

    def reason(self) -> str:
        """Why the ring has ended; empty if nobody has said."""
        [length] = _LENGTH.unpack_from(self.memory, REASON)
        begin = REASON + _LENGTH.size
        return bytes(self.memory[begin : begin + length]).decode(errors="replace")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Alone among all processes that map the segment; the kernel frees the lock of one that dies."""
        with self._lock:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def set_reason(self, reason: str) -> None:
        """With the lock held."""
        text = reason.encode()[:MOST_REASON]
        begin = REASON + _LENGTH.size
        self.memory[begin : begin + len(text)] = text
        _LENGTH.pack_into(self.memory, REASON, len(text))


def new_file(directory: Path) -> int:
    """A file without a name, not inheritable, mode 0600. Raises RingError."""
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
    """All of `data`. Raises OSError when the file system is full."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count


def read(file: int, size: int, offset: int) -> bytes | None:
    """So many bytes; None if the file ends before."""
    data = os.pread(file, size, offset)
    parts = [data]
    missing = size - len(data)
    while missing and data:  # one call reads at most 2 GiB
        data = os.pread(file, missing, offset + size - missing)
        parts.append(data)
        missing -= len(data)
    return None if missing else parts[0] if len(parts) == 1 else b"".join(parts)


def no_space(directory: Path, what: str, needed: int) -> RingSpaceError:
    """The error of a file system that is too full for `needed` bytes."""
    return RingSpaceError(
        f"{what} needs {needed / _MIB:.1f} MiB, and {directory} has {free_bytes(directory) / _MIB:.1f} MiB free; "
        "make it larger (docker run --shm-size; in Kubernetes an emptyDir of medium Memory, mounted there)"
    )


def free_bytes(directory: Path) -> int:
    """That a file system still has for files."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
