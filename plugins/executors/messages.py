"""What passes between an executor and its workers beside steps and results: messages, as msgpack; a socket of them."""

from __future__ import annotations

import socket
from typing import Any, Generic, TypeVar

import msgspec

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed import Rendezvous
from engine.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    ExecutorError,
    PluginError,
    PluginFaultError,
)
from engine.core.executors import MessageDecoder, encode
from engine.core.shm import RingHandle
from engine.core.startup import Progress
from engine.core.types import CacheInfo

T = TypeVar("T")

LONGEST = 2**17
"""Bytes of a message, at most; what a socket takes at once by default is more."""

ERRORS: tuple[type[EngineError], ...] = (
    CheckpointError,
    CapacityError,
    ConfigError,
    PluginError,
    PluginFaultError,
    ExecutorError,
)
"""Those of a worker that are raised as what they are in the executor's process too."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to run, and as which rank."""

    config: EngineConfig
    executor: str
    """Its class, as module:name."""
    manifest: tuple[tuple[str, str, str], ...]
    """The plugins that the executor's process has loaded."""
    device: str
    """cpu or cuda:N."""
    first: DeviceInfo
    """The first of the executor's devices, as the executor's process sees it."""
    rendezvous: Rendezvous


class Launch(Assignment, frozen=True, kw_only=True):
    """The first message to a worker of `multiproc` or `tp`."""

    steps: RingHandle
    results: RingHandle | None
    """Rank 0's; the others answer nothing."""
    beats: int
    """File descriptor of the beats."""
    stack: int
    """File descriptor that SIGUSR1 writes the stack to."""


class Progressed(msgspec.Struct, frozen=True, tag="told"):
    """How far a phase of the start is."""

    progress: Progress


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Steps can be sent."""

    cache: CacheInfo


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot start, or cannot go on; it exits."""

    phase: str
    """weights; or step 12."""
    kind: str
    """The error's class."""
    known: str
    """The class of core/errors.py that it derives from; empty if there is none."""
    message: str
    hint: str
    """What may help; empty if the message says it, or nobody knows."""
    traceback: str

    @property
    def unexpected(self) -> bool:
        """Whether somebody has to look at the traceback."""
        return self.known in ("", PluginFaultError.__name__)

    def error(self, worker: str) -> EngineError:
        """As an error of this process; worker: who said it."""
        cls = next((cls for cls in ERRORS if cls.__name__ == self.known), ExecutorError)
        message = self.message if self.known else f"{self.kind}: {self.message}"
        hint = f"; {self.hint}" if self.hint else ""
        return cls(f"{worker} failed in {self.phase}: {message}{hint}")


FromWorker = Progressed | Ready | Failed


class Connection(Generic[T]):
    """One end of a socket that keeps messages apart; T: what the other end says."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._socket = end
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)

    def send(self, message: Any) -> None:
        """Raises OSError when the other end is gone."""
        self._socket.sendall(encode(message))

    def receive(self) -> T | None:
        """The next message; None when the other end is gone. Raises BlockingIOError if there is none, on an end that
        does not wait, and EngineError for what is no message."""
        try:
            data = self._socket.recv(LONGEST)
        except ConnectionError:
            return None
        return self._decoder.decode(data) if data else None

    def fileno(self) -> int:
        """For poll()."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
