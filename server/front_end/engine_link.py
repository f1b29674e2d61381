"""A front end's connection to one replica of the engine, and what is known of that one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.core.executors import MessageDecoder, encode
from engine.core.types import EngineStats
from engine.server.shared.heartbeat import Fault, Heartbeat
from engine.server.shared.messages import SOCKET, EngineGone, FromClient, Hello, Outputs, Started


class Link:
    """The connection to a replica's engine process, one after the other. Use from the event loop's thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        replica: int,
        hand_out: Callable[[Outputs], None],
        handed_out: Callable[[], None],
    ) -> None:
        """hand_out: is given each message; handed_out: called when all are given that have come."""
        self.replica = replica
        self.life = 0
        """How many engine processes the replica has had before this one."""
        self.started: Started | None = None
        """What the latest one has said that could start; None: none has yet."""
        self.stats = EngineStats()
        self.failure: EngineGone | None = None
        self.pulse: Heartbeat | None = None
        """None before the engine has started."""
        self._context = context
        self._hand_out = hand_out
        self._handed_out = handed_out
        self._decoder: MessageDecoder[Outputs] = MessageDecoder(Outputs)
        self._socket: zmq.Socket[bytes] | None = None

    def open(self, directory: str, name: str, started: Started) -> None:
        """Begin to talk, as `name`, to an engine process that has started, of the server that has this directory."""
        self.close()
        self.life, self.started, self.failure = started.life, started, None
        self.pulse = Heartbeat.map(directory, self.replica)
        # A socket of its own for each process: what was sent to a dead one must not reach the next.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(f"ipc://{Path(directory) / SOCKET.format(self.replica, self.life)}")
        asyncio.get_running_loop().add_reader(self._socket.FD, self._receive)
        self.send(Hello())

    def send(self, message: FromClient) -> None:
        """Tell the engine process, which must not be known as dead."""
        assert self._socket is not None
        # A socket without high-water mark takes the message at once.
        self._socket.send(encode(message), zmq.DONTWAIT)
        self._look_again()

    def bury(self, failure: EngineGone) -> None:
        """The engine process is dead."""
        self.close()
        self.life, self.failure = failure.life, failure
        self.stats = EngineStats()

    def fault(self, limit: float) -> Fault | None:
        """What is wrong with the engine, as far as that is known without asking it; limit: server.health_timeout."""
        gone = self.failure
        if gone is not None:
            return Fault(
                level="process", reason=gone.reason, since=gone.since, starting=gone.starting, restart=gone.restart
            )
        return None if self.pulse is None else self.pulse.fault(limit)

    def close(self) -> None:
        """Receive no more; a second call does nothing."""
        socket, self._socket = self._socket, None
        if socket is not None:
            asyncio.get_running_loop().remove_reader(socket.FD)
            socket.close(linger=0)

    def _look_again(self) -> None:
        """ZeroMQ's descriptor becomes readable once for all that has come, and any call may take that sign away."""
        assert self._socket is not None
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            message = self._decoder.decode(data)
            if message.stats is not None:
                self.stats = message.stats
            self._hand_out(message)
        # Only now: what came in several messages because this process was late leaves in one write a stream.
        self._handed_out()
