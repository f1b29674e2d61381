"""Control messages between an executor and its workers, and the socket that carries them.

Steps and control calls are not among them: `Step`, `StepResult` (core/types) and `Call` (core/executors) travel as
msgpack through rings in shared memory (core/shm/); with Ray, as arguments and answers of actor calls. The answers to
control calls are.
"""

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
    DownloadError,
    EngineError,
    ExecutorError,
    PluginError,
    PluginFaultError,
    StepFaultError,
)
from engine.core.executors import Answer, MessageDecoder, encode
from engine.core.shm import RingHandle
from engine.core.startup import Progress
from engine.core.types import CacheInfo

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2**17
"""Maximum size of a message; a socket's default buffer is larger."""

ERRORS: tuple[type[EngineError], ...] = (
    CheckpointError,
    DownloadError,
    CapacityError,
    ConfigError,
    PluginError,
    PluginFaultError,
    ExecutorError,
    StepFaultError,
)
"""Error classes that keep their class when a worker's error is raised in the executor's process."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker runs: the configuration, its device and its rank."""

    config: EngineConfig
    executor: str
    """Class of the executor, as module:name."""
    manifest: tuple[tuple[str, str, str], ...]
    """The plugins that the executor's process has loaded."""
    device: str
    """The worker's device: cpu or cuda:N."""
    first_device: DeviceInfo
    """The device of rank 0, as the executor's process sees it."""
    rendezvous: Rendezvous
    speculates: bool = False
    """Whether steps may have drafts, also those of a speculator that only the executor's process has."""


class Launch(Assignment, frozen=True, kw_only=True):
    """The first message to a worker of `multiproc` or `tp`."""

    steps: RingHandle
    results: RingHandle | None
    """For rank 0; None for the other ranks, which send no results."""
    heartbeats: int
    """File descriptor of the HeartbeatTable."""
    stack: int
    """File descriptor of the worker's stack dumps, which SIGUSR1 requests."""


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of a start-up phase."""

    progress: Progress


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker can run steps."""

    cache: CacheInfo


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot start or cannot continue; it exits."""

    phase: str
    """Where the error was raised, as "weights" or "step 12"."""
    kind: str
    """Class of the error."""
    known: str
    """Its base class among ERRORS; empty if there is none."""
    message: str
    hint: str
    """What may help; empty if the message says it or no hint is known."""
    traceback: str

    @property
    def unexpected(self) -> bool:
        """Whether the traceback is needed to understand the error."""
        return self.known in ("", PluginFaultError.__name__, StepFaultError.__name__)

    def error(self, worker: str) -> EngineError:
        """Return the error to raise in the executor's process; worker: the name of the sender."""
        cls = next((cls for cls in ERRORS if cls.__name__ == self.known), ExecutorError)
        message = self.message if self.known else f"{self.kind}: {self.message}"
        hint = f"; {self.hint}" if self.hint else ""
        return cls(f"{worker} failed in {self.phase}: {message}{hint}")


FromWorker = Progressed | Ready | Failed | Answer


class Connection(Generic[T]):
    """One end of a socket that preserves message boundaries; T: the messages of the other end."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._socket = end
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError when the other end is closed."""
        self._socket.sendall(encode(message))

    def receive(self) -> T | None:
        """Receive the next message; None when the other end is closed.

        Raises BlockingIOError if a non-blocking end has no message, and EngineError for data that is no message.
        """
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except ConnectionError:
            return None
        return self._decoder.decode(data) if data else None

    def fileno(self) -> int:
        """The socket's descriptor, for poll()."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Create the sockets for the two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
