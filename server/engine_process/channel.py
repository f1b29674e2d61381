"""The engine process's connections to the front ends and the supervisor, behind one poll."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import zmq

from engine.core.executors import MessageDecoder, encode
from engine.server.shared.messages import FrontEndToEngine, Outputs, SupervisorToEngine

MAX_MESSAGES = 32
"""Maximum number of front end messages read between two steps: a burst of requests must not delay running ones."""


class Channel:
    """Sends outputs to front ends; receives messages from front ends and the supervisor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        """path: of the ZeroMQ socket."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # sending never waits for a front end
        self._socket.bind(f"ipc://{path}")
        self._decoder: MessageDecoder[FrontEndToEngine] = MessageDecoder(FrontEndToEngine)
        # Wakes `wait` from the supervisor link's thread: a ZeroMQ socket belongs to one thread.
        self._wake_sender, self._wake_receiver = (context.socket(zmq.PAIR) for _ in range(2))
        self._wake_receiver.bind("inproc://supervisor")
        self._wake_sender.connect("inproc://supervisor")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._from_supervisor: deque[SupervisorToEngine] = deque()

    def put(self, message: SupervisorToEngine) -> None:
        """Queue a message of the supervisor; called from the supervisor link's thread."""
        self._from_supervisor.append(message)
        self._wake_sender.send(b"")

    def send(self, peer: bytes, message: Outputs) -> None:
        """Queue a message to a front end; a no-op if it has exited. Never blocks."""
        self._socket.send(peer, zmq.SNDMORE)
        self._socket.send(encode(message))

    def wait(self, milliseconds: int) -> None:
        """Wait until a message has come, at most `milliseconds`."""
        if self._wake_receiver in dict(self._poller.poll(milliseconds)):
            self._wake_receiver.recv()

    def receive(self) -> Iterator[tuple[bytes, FrontEndToEngine | SupervisorToEngine]]:
        """Yield (sender, message) for each waiting message; the sender is a ZeroMQ identity, b"" for the supervisor."""
        while self._from_supervisor:
            yield b"", self._from_supervisor.popleft()
        for _ in range(MAX_MESSAGES):
            try:
                peer = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield peer, self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close the sockets; messages already queued have one second to leave."""
        self._socket.close(linger=1000)
        self._wake_sender.close(linger=0)
        self._wake_receiver.close(linger=0)
