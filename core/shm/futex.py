"""Signalling by atomic counters in shared memory, with futexes to sleep on: _ring.c. Linux only."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import sys
from typing import Any

from engine.core.shm.segment import PAGE, Segment
from engine.core.shm.signals import ReaderSignals, Signals, Spin, WriterSignals

_POINTER, _NUMBER, _TIME = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ring_bytes": (_TIME, _NUMBER),
    "ring_init": (None, _POINTER, _NUMBER, _NUMBER),
    "ring_await_room": (ctypes.c_int, _POINTER, _POINTER, _TIME),
    "ring_publish": (None, _POINTER, _POINTER),
    "ring_announce": (None, _POINTER, _POINTER),
    "ring_offer": (ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_char_p, ctypes.c_uint64),
    "ring_take": (_TIME, _POINTER, _POINTER, _POINTER, _POINTER, _TIME),
    "ring_slowest": (ctypes.c_uint64, _POINTER),
    "ring_await_message": (ctypes.c_int, _POINTER, _POINTER, _TIME),
    "ring_advance": (ctypes.c_int, _POINTER, _POINTER),
    "ring_drop": (None, _POINTER, _NUMBER),
    "ring_ended": (ctypes.c_int, _POINTER),
    "ring_end": (None, _POINTER),
    "budget_covers": (ctypes.c_int, _POINTER, _TIME, _TIME),
    "budget_pay": (None, _POINTER, _TIME),
}
"""Function -> result type and argument types. Calls release the GIL."""
SHARES = 1024
"""As in _ring.h: the unit of shares of time; SHARES of SHARES is all."""
_MAX_SAVED_SPINS = 2
"""Maximum number of consecutive announcements that a reader may spin for to the end, before its budget is empty."""


class Budget(ctypes.Structure):
    """budget_t of _ring.h."""

    _fields_ = (("share", ctypes.c_int64), ("most", ctypes.c_int64), ("saved", ctypes.c_int64), ("at", ctypes.c_int64))


class _End(ctypes.Structure):
    """end_t of _ring.h."""

    _fields_ = (
        ("sequence", ctypes.c_uint64),
        ("room", ctypes.c_uint64),
        ("spin", ctypes.c_int64),
        ("spin_most", ctypes.c_int64),
        ("announce", ctypes.c_int64),
        ("heeded", ctypes.c_int64),
        ("budget", Budget),
        ("index", ctypes.c_uint32),
    )


class _Slots(ctypes.Structure):
    """slots_t of _ring.h."""

    _fields_ = (("memory", _POINTER), ("stride", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


@functools.cache
def native_part() -> Any:
    """Load the functions of _ring.c; None if it was not built."""
    spec = importlib.util.find_spec("engine.core.shm._ring")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    for name, (returns, *takes) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returns, takes
    return library


class FutexSignals(Signals):
    """Signals of rings on Linux, where the native part was built."""

    implementation = "futex"

    @classmethod
    def refuses(cls) -> str | None:
        if not sys.platform.startswith("linux"):
            return f"futexes are Linux's, and this is {sys.platform}; rings of pipes work here"
        if native_part() is None:
            return "its native part was not built; install again with a C compiler at hand, or use rings of pipes"
        return None

    @classmethod
    def control_bytes(cls, readers: int) -> int:
        return int(native_part().ring_bytes(readers))

    @classmethod
    def descriptors(cls, readers: int) -> tuple[int, ...]:
        return ()

    def __init__(self, segment: Segment, readers: int, slots: int, spin: Spin, *, new: bool) -> None:
        self._library = native_part()
        self._segment = segment
        self._anchor = ctypes.c_char.from_buffer(segment.map, PAGE)  # keeps the memory mapped
        self._ring = ctypes.addressof(self._anchor)
        self.slots = _Slots(self._ring - PAGE + segment.slot(0), segment.stride, segment.slot_bytes)
        self._spin = 1000 * spin.us
        self._share = int(spin.share * SHARES)
        self._announce = 1000 * spin.announce_us if self._share else 0
        if new:
            self._library.ring_init(self._ring, readers, slots)

    def writer(self) -> WriterSignals:
        return _Writer(self, self._library, self._ring, self._new_end())

    def reader(self, index: int) -> ReaderSignals:
        end = self._new_end()
        end.index, end.budget = index, Budget(share=self._share, most=_MAX_SAVED_SPINS * self._announce)
        return _Reader(self, self._library, self._ring, end)

    def drop(self, index: int) -> None:
        self._library.ring_drop(self._ring, index)

    def ended(self) -> bool:
        return bool(self._library.ring_ended(self._ring))

    def end(self) -> None:
        self._library.ring_end(self._ring)

    def _new_end(self) -> _End:
        return _End(spin=self._spin, spin_most=self._spin, announce=self._announce)


class _FutexEnd:
    """Common base of both ends: the addresses passed to C, and the objects that own that memory."""

    def __init__(self, signals: FutexSignals, library: Any, ring: int, end: _End) -> None:
        self._signals = signals
        self._library = library
        self._ring = ring
        self._state = end
        self._end = ctypes.addressof(end)
        self._slots = ctypes.addressof(signals.slots)

    @property
    def sequence(self) -> int:
        return int(self._state.sequence)


class _Writer(_FutexEnd, WriterSignals):
    def wait(self, until: int) -> int:
        return int(self._library.ring_await_room(self._ring, self._end, until))

    def publish(self) -> None:
        self._library.ring_publish(self._ring, self._end)

    def announce(self) -> None:
        self._library.ring_announce(self._ring, self._end)

    def offer(self, message: bytes) -> bool:
        return bool(self._library.ring_offer(self._ring, self._end, self._slots, message, len(message)))

    def slowest(self) -> int:
        return int(self._library.ring_slowest(self._ring))


class _Reader(_FutexEnd, ReaderSignals):
    def __init__(self, signals: FutexSignals, library: Any, ring: int, end: _End) -> None:
        super().__init__(signals, library, ring, end)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._copy = mmap.mmap(-1, signals.slots.bytes, private)  # takes memory only once used
        self._anchor = ctypes.c_char.from_buffer(self._copy)
        self._out = ctypes.addressof(self._anchor)

    def wait(self, until: int) -> int:
        return int(self._library.ring_await_message(self._ring, self._end, until))

    def take(self, until: int) -> bytes | None:
        size = self._library.ring_take(self._ring, self._end, self._slots, self._out, until)
        return self._copy[:size] if size >= 0 else None

    def advance(self) -> int:
        return int(self._library.ring_advance(self._ring, self._end))
