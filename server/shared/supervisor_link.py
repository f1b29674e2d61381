"""The link between the supervisor and a process it started: messages over the process's standard input.

Each message is 4 bytes of length, big-endian, then msgpack. The kernel closes the connection however either side dies,
so each side notices the other's exit.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.core.executors import MessageDecoder, encode

T = TypeVar("T")

LENGTH_BYTES = 4
"""Size of the length before each message."""


def frame(message: Any) -> bytes:
    """Encode a message with its length in front."""
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class SupervisorLink(Generic[T]):
    """A process's end of its link to the supervisor. T: messages received after the launch message."""

    def __init__(self, kind: Any) -> None:
        """kind: T, as the decoder needs it at run time."""
        self._socket = _take_stdin()
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)

    def launch(self, kind: type[Any]) -> Any:
        """Wait for the first message, of type `kind`."""
        data = self._read()
        if data is None:
            sys.exit("error: this process is started by `engine serve`, not by hand")
        return MessageDecoder[Any](kind).decode(data)

    def send(self, message: Any) -> None:
        """Send a message to the supervisor."""
        self._socket.sendall(frame(message))

    def listen(self, handle: Callable[[T], None], directory: str) -> None:
        """Call `handle` with each message from now on, in a thread.

        When the supervisor exits, even while the main thread is busy, remove its directory and exit immediately.
        """
        threading.Thread(target=self._listen, args=(handle, directory), name="supervisor", daemon=True).start()

    def _listen(self, handle: Callable[[T], None], directory: str) -> None:
        while (data := self._read()) is not None:
            handle(self._decoder.decode(data))
        shutil.rmtree(directory, ignore_errors=True)  # a killed supervisor had no time to
        os._exit(1)

    def _read(self) -> bytes | None:
        """Read one message; None at the end of the connection."""
        head = self._read_bytes(LENGTH_BYTES)
        return None if head is None else self._read_bytes(int.from_bytes(head, "big"))

    def _read_bytes(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)


def _take_stdin() -> socket.socket:
    """Move standard input to another descriptor, so that no library reads from the link."""
    try:
        own = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("error: this process is started by `engine serve`, not by hand")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return own
