"""Starts, replaces, drains and stops the front ends, and distributes connections; runs in the supervisor."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from attrs import define, field

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.server.shared.api_keys import read_api_keys
from engine.server.shared.limits_table import LimitsTable, has_limits
from engine.server.shared.messages import (
    LIMITS_FILE,
    Drain,
    Drained,
    EngineEvent,
    Failed,
    FrontEndExited,
    FrontEndLaunch,
    FrontEndToSupervisor,
    Ready,
    Shutdown,
    Started,
    SupervisorToFrontEnd,
)
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable
from engine.server.shared.throttled_log import ThrottledWarning
from engine.server.supervisor.child import Child
from engine.server.supervisor.silence import Silence

RESTART_INTERVAL = 1.0
"""Minimum seconds between two starts of a front end in one slot."""
DRAIN_GRACE = 5.0
"""Seconds beyond server.shutdown_timeout in which a front end must report that it is drained."""
RETRY = 0.005
"""Seconds until a connection is offered again when no front end could take it."""
ACCEPT_RETRY = 0.1
"""Seconds until the next attempt to accept when the supervisor or the system has no file descriptor left."""
LATE = 2.0
"""Seconds without a heartbeat after which a front end gets no connection while another one has a heartbeat."""
START_TIMEOUT = 300.0
"""Minimum seconds in which a starting front end must show its first heartbeat."""

log = logging.getLogger(__name__)


@define(eq=False)
class _Slot:
    """A row of the metrics table and the front end that currently owns the row."""

    row: int
    metrics: FrontEndMetrics
    child: Child[FrontEndToSupervisor] | None = None
    channel: socket.socket | None = None
    """Socket over which connections are passed; None while the front end cannot take any."""
    passed_connections: int = 0
    """Connections passed to the front ends of this slot so far."""
    silence: Silence = field(factory=Silence)
    ready: asyncio.Event = field(factory=asyncio.Event)
    drained: asyncio.Event = field(factory=asyncio.Event)

    @property
    def open_connections(self) -> int:
        """Number of connections that the front end holds."""
        return self.passed_connections - self.metrics.closed_connections


class FrontEnds:
    """All front ends of a server."""

    def __init__(
        self,
        config: EngineConfig,
        directory: str,
        metrics: MetricsTable,
        command: Sequence[str],
        notify_engines: Callable[[FrontEndExited], None],
    ) -> None:
        """metrics: one row per front end. command: starts one. notify_engines: called when a front end has exited.

        Raises ConfigError when the API keys cannot be read.
        """
        self._config = config
        self._directory = directory
        self._command = command
        self._notify_engines = notify_engines
        self._slots = [_Slot(index, row) for index, row in enumerate(metrics.rows)]
        self._created = int(time.time())
        self._api_keys = read_api_keys(config.server)
        if has_limits(config.server):
            LimitsTable.create(Path(directory) / LIMITS_FILE, len(self._slots), len(self._api_keys))
        self._num_started = 0
        self._replica_events: dict[int, list[EngineEvent]] = {}
        """For each replica, the events that a front end started later must receive too."""
        self._draining = False
        self.stopped = False
        """Whether Shutdown has been sent."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all front ends and wait until they are ready. Raises EngineError when one cannot start."""
        self._tasks = [asyncio.create_task(self._supervise(slot)) for slot in self._slots]
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        failed = [task for task in self._tasks if task.done()]
        if failed:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            failed[0].result()

    def notify(self, event: EngineEvent) -> None:
        """Send an event to all front ends, including those started later."""
        earlier = self._replica_events.get(event.replica, [])
        started = [] if isinstance(event, Started) else [each for each in earlier if isinstance(each, Started)]
        self._replica_events[event.replica] = [*started, event]
        self._broadcast(event)

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections and pass each to the front end that has the fewest.

        Connections live long, so each front end should have the same number. The kernel does not balance them: of 256
        connections hashed to 4 listening sockets, one socket typically gets 72; and from one shared listening socket,
        the first process to wake takes as many as it can.
        """
        loop = asyncio.get_running_loop()
        failed = ThrottledWarning(log, "failed attempts to accept a connection: %d (%s)")
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionError:  # the client has disconnected already
                continue
            except OSError as error:  # no file descriptor or memory is left; the connection waits in the backlog
                failed.count(1, error)
                await asyncio.sleep(ACCEPT_RETRY)
                continue
            with connection:
                while not self._pass_on(connection):
                    await asyncio.sleep(RETRY)

    async def drain(self) -> None:
        """Refuse new requests and wait until running ones have ended, at most server.shutdown_timeout."""
        self._draining = True
        self._broadcast(Drain())
        waits = [asyncio.ensure_future(slot.drained.wait()) for slot in self._slots if slot.child is not None]
        if waits:
            _, late = await asyncio.wait(waits, timeout=self._config.server.shutdown_timeout + DRAIN_GRACE)
            for wait in late:
                wait.cancel()

    async def shutdown(self, seconds: float) -> None:
        """Stop all front ends and log those that need more than `seconds`, which `kill` ends."""
        self.stopped = True
        self._broadcast(Shutdown())
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            log.warning("%d front ends did not stop within %g s; killing", len(late), seconds)

    def kill(self) -> None:
        """Kill all front ends and wait until they have exited."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill_and_reap()
            if slot.channel is not None:
                slot.channel.close()

    async def _all_ready(self) -> None:
        for slot in self._slots:
            await slot.ready.wait()

    def _broadcast(self, message: SupervisorToFrontEnd) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send(message)

    def _pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection to a front end; False: none could take it."""
        for slot in sorted(self._slots, key=lambda slot: (slot.silence.seconds >= LATE, slot.open_connections)):
            if slot.channel is not None:
                try:
                    socket.send_fds(slot.channel, [b"c"], [connection.fileno()])
                except OSError as error:  # busy with the connections it has, or exiting
                    log.debug("front end %d takes no connection: %s", slot.row, error)
                    continue
                slot.passed_connections += 1
                return True
        return False

    async def _supervise(self, slot: _Slot) -> None:
        """Run the front ends of a slot, one after another. Raises EngineError when the first cannot start."""
        while True:
            started = time.monotonic()
            try:
                reason = await self._run_process(slot)
            except OSError as error:  # no resources for a process, perhaps for a moment
                reason = f"a front end could not be started: {error}"
            if self.stopped:
                return
            if not slot.ready.is_set():
                raise EngineError(reason)
            log.error("%s; its requests are lost, and a new front end replaces it", reason)
            await asyncio.sleep(started + RESTART_INTERVAL - time.monotonic())

    async def _watch(self, slot: _Slot, child: Child[FrontEndToSupervisor]) -> str:
        """Kill a front end whose event loop has not run for server.front_end_timeout; why, as a sentence."""
        timeout = self._config.server.front_end_timeout
        seconds = await slot.silence.lasts(lambda: slot.metrics.heartbeats, timeout, START_TIMEOUT)
        child.kill()
        return f"a front end answered nothing for {seconds:g} s (server.front_end_timeout) and was killed"

    async def _run_process(self, slot: _Slot) -> str:
        """Start one front end and wait until it has exited; why it exited, as a sentence."""
        self._num_started += 1
        name = f"{slot.row}.{self._num_started}"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                launch = FrontEndLaunch(
                    config=self._config,
                    directory=self._directory,
                    name=name,
                    row=slot.row,
                    rows=len(self._slots),
                    connections=theirs.fileno(),
                    created=self._created,
                    api_keys=self._api_keys,
                )
                child = await Child[FrontEndToSupervisor].start(
                    self._command, FrontEndToSupervisor, launch, [theirs.fileno()]
                )
            slot.child = child
            for event in chain.from_iterable(self._replica_events.values()):
                child.send(event)
            if self._draining:
                child.send(Drain())
            failure = ""
            watch = asyncio.create_task(self._watch(slot, child))
            try:
                async for message in child.messages():
                    match message:
                        case Ready():
                            slot.channel = ours
                            slot.silence.seconds = 0.0  # a slow start is not a late heartbeat
                            slot.ready.set()
                        case Drained():
                            slot.drained.set()
                        case Failed(error):
                            failure = error
            finally:
                slot.channel = None
                watch.cancel()
        if self._draining:
            slot.drained.set()
        slot.child = None
        slot.silence = Silence()
        slot.passed_connections = slot.metrics.closed_connections
        slot.metrics.abort_open_requests()
        self._notify_engines(FrontEndExited(name))
        if watch.done() and not watch.cancelled():
            failure = watch.result()
        return failure or f"a front end {child.exit_status}"
