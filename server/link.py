"""A front end's connection to one replica of the engine, and what is known of that one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.core.types import EngineStats
from engine.core.wire import Decoder, encode
from engine.server.messages import SOCKET, EngineGone, FromClient, Outputs
from engine.server.pulse import Fault, Pulse

RECONNECT_MS = 20
"""How often to look for the engine's socket while the engine starts."""


class Link:
    """The connection to one engine process. Use from the event loop's thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        replica: int,
        hand_out: Callable[[Outputs], None],
        handed_out: Callable[[], None],
    ) -> None:
        """hand_out: is given each message; handed_out: called when all are given that have come."""
        self.replica = replica
        self.stats = EngineStats()
        self.failure: EngineGone | None = None
        self.pulse: Pulse | None = None
        """None before the engine has started."""
        self._hand_out = hand_out
        self._handed_out = handed_out
        self._decoder: Decoder[Outputs] = Decoder(Outputs)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)

    def connect(self, directory: str, name: str) -> None:
        """Begin to talk, as `name`, to the engine process of the server that has this directory."""
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(f"ipc://{Path(directory) / SOCKET.format(self.replica)}")
        asyncio.get_running_loop().add_reader(self._socket.FD, self._receive)

    def send(self, message: FromClient) -> None:
        """Tell the engine process."""
        # A socket without high-water mark takes the message at once, also while the engine process is not there yet.
        self._socket.send(encode(message), zmq.DONTWAIT)
        self._look_again()

    def bury(self, failure: EngineGone) -> None:
        """The engine process is dead."""
        self.failure = failure
        self.stats = EngineStats()

    def fault(self, limit: float) -> Fault | None:
        """What is wrong with the engine, as far as that is known without asking it; limit: server.health_timeout."""
        if self.failure is not None:
            return Fault(level="process", reason=self.failure.reason, since=self.failure.since)
        return None if self.pulse is None else self.pulse.fault(limit)

    def close(self) -> None:
        """Receive no more."""
        asyncio.get_running_loop().remove_reader(self._socket.FD)

    def _look_again(self) -> None:
        """ZeroMQ's descriptor becomes readable once for all that has come, and any call may take that sign away."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            message = self._decoder.decode(data)
            if message.stats is not None and self.failure is None:
                self.stats = message.stats
            self._hand_out(message)
        # Only now: what came in several messages because this process was late leaves in one write a stream.
        self._handed_out()
