"""A front end's link to one replica, and the state of that replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.core.executors import MessageDecoder, encode
from engine.core.types import EngineStats
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.shared.heartbeat import Fault, Heartbeat
from engine.server.shared.messages import SOCKET, EngineDown, FrontEndToEngine, Hello, Outputs, Probe, Started

PROBE_POLL = 0.01
"""Seconds between two reads of the heartbeat while waiting for a step."""


class EngineLink:
    """The link to a replica's current engine process. Use from the event loop's thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        replica: int,
        on_outputs: Callable[[Outputs], None],
        on_batch_end: Callable[[], None],
        phases: PhaseTimes,
    ) -> None:
        """on_outputs: called with each message. on_batch_end: called when all received messages have been handled."""
        self.replica = replica
        self.incarnation = 0
        """Number of engine processes of this replica before the current one."""
        self.started: Started | None = None
        """Message of the latest process that has started; None: none has started yet."""
        self.stats = EngineStats()
        self.down: EngineDown | None = None
        """Set while the replica accepts no requests, once its first process has exited."""
        self.heartbeat: Heartbeat | None = None
        """None until the first process has started."""
        self._context = context
        self._on_outputs = on_outputs
        self._on_batch_end = on_batch_end
        self._on_readable = phases.timed("deliver", self._receive)
        self._decoder: MessageDecoder[Outputs] = MessageDecoder(Outputs)
        self._socket: zmq.Socket[bytes] | None = None

    def connect(self, directory: str, name: str, started: Started) -> None:
        """Connect to an engine process that has started, under the ZeroMQ identity `name`.

        directory: the server's own directory.
        """
        self.close()
        self.incarnation, self.started, self.down = started.incarnation, started, None
        self.heartbeat = Heartbeat.map(directory, self.replica)
        # One socket per process: messages queued for an exited process must not reach its successor.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(f"ipc://{Path(directory) / SOCKET.format(self.replica, self.incarnation)}")
        asyncio.get_running_loop().add_reader(self._socket.FD, self._on_readable)
        self.send(Hello())

    def send(self, message: FrontEndToEngine) -> None:
        """Send a message to the engine process; `down` must be None. Never blocks."""
        assert self._socket is not None
        self._socket.send(encode(message), zmq.DONTWAIT)  # without high-water mark the socket always accepts
        self._check_for_messages()

    def mark_down(self, down: EngineDown) -> None:
        """Close the link: the engine process has exited."""
        self.close()
        self.incarnation, self.down = down.incarnation, down
        self.stats = EngineStats()

    def fault(self, timeout: float) -> Fault | None:
        """What is wrong with the replica, without asking the engine process. timeout: server.health_timeout."""
        down = self.down
        if down is not None:
            return Fault(
                level="process", reason=down.reason, since=down.since, starting=down.starting, restart=down.restart
            )
        return None if self.heartbeat is None else self.heartbeat.fault(timeout)

    async def probe(self, timeout: float) -> float | Fault:
        """Make the replica compute a step; the seconds until it completed, or the replica's fault.

        timeout: server.health_timeout.
        """
        requested = time.monotonic()
        if self.down is None:
            self.send(Probe())
        while True:
            if (fault := self.fault(timeout)) is not None:
                return fault
            assert self.heartbeat is not None
            if self.heartbeat.step_completed > requested:
                return time.monotonic() - requested
            if time.monotonic() - requested > timeout:
                return self.heartbeat.missing_step(requested)
            await asyncio.sleep(PROBE_POLL)

    def close(self) -> None:
        """Close the socket; a no-op if closed already."""
        socket, self._socket = self._socket, None
        if socket is not None:
            asyncio.get_running_loop().remove_reader(socket.FD)
            socket.close(linger=0)

    def _check_for_messages(self) -> None:
        """Schedule `_receive` if messages are waiting.

        ZeroMQ's descriptor becomes readable only once for all waiting messages, and any call on the socket may clear
        the descriptor's state.
        """
        assert self._socket is not None
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._on_readable)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            message = self._decoder.decode(data)
            if message.stats is not None:
                self.stats = message.stats
            self._on_outputs(message)
        # After all messages: when this process is late and several are waiting, each stream still writes only once.
        self._on_batch_end()
