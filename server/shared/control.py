"""The connection between the supervisor and each of its processes: messages over the process's standard input.

Each message is 4 bytes of length, big-endian, and msgpack. The kernel closes the connection however a side dies, so its
end tells the other.
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

LENGTH = 4
"""Bytes of the length before a message."""


def frame(message: Any) -> bytes:
    """A message with its length before it."""
    data = encode(message)
    return len(data).to_bytes(LENGTH, "big") + data


class Control(Generic[T]):
    """The end that a process has of the connection to its supervisor; T: what it is told after the launch."""

    def __init__(self, kind: Any) -> None:
        self._socket = _own_stdin()
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)

    def launch(self, kind: type[Any]) -> Any:
        """Wait for the first message, one of type `kind`."""
        data = self._read()
        if data is None:
            sys.exit("error: this process is started by `engine serve`, not by hand")
        return MessageDecoder[Any](kind).decode(data)

    def send(self, message: Any) -> None:
        """Tell the supervisor."""
        self._socket.sendall(frame(message))

    def listen(self, handle: Callable[[T], None], directory: str) -> None:
        """Call `handle` with each message from now on, in a thread.

        When the supervisor is gone, also while the main thread is busy, remove its directory and exit at once.
        """
        threading.Thread(target=self._listen, args=(handle, directory), name="supervisor", daemon=True).start()

    def _listen(self, handle: Callable[[T], None], directory: str) -> None:
        while (data := self._read()) is not None:
            handle(self._decoder.decode(data))
        shutil.rmtree(directory, ignore_errors=True)  # the supervisor had no time for it, or has done so
        os._exit(1)

    def _read(self) -> bytes | None:
        """One message; None at the end."""
        head = self._exactly(LENGTH)
        return None if head is None else self._exactly(int.from_bytes(head, "big"))

    def _exactly(self, size: int) -> bytes | None:
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


def _own_stdin() -> socket.socket:
    """Standard input under another number, so that nothing else reads from it."""
    try:
        own = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("error: this process is started by `engine serve`, not by hand")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return own
