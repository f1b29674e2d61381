"""Starts, restarts and stops the engine processes; runs in the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define, field, frozen
from msgspec.structs import replace

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.server.shared.heartbeat import Heartbeat
from engine.server.shared.messages import (
    SOCKET,
    EngineDown,
    EngineEvent,
    EngineLaunch,
    EngineToSupervisor,
    Failed,
    FrontEndExited,
    Shutdown,
    Started,
)
from engine.server.supervisor.child import Child
from engine.server.supervisor.restart_policy import RestartPolicy
from engine.server.supervisor.silence import Silence

SLOW_EXIT = 10.0
"""Seconds after which descendants that survive SIGKILL are logged."""

log = logging.getLogger(__name__)


@define(eq=False)
class _Replica:
    """A replica and its current engine process."""

    number: int
    config: EngineConfig
    restarts: RestartPolicy
    first_start: asyncio.Future[Started] = field(factory=asyncio.Future)
    """Resolved when the replica's first process has started."""
    incarnation: int = 0
    """Number of engine processes before the current one."""
    child: Child[EngineToSupervisor] | None = None
    ready_since: float | None = None
    """When the current process began to accept requests, time.monotonic(); None: it accepts none."""


@frozen
class _Exit:
    """Why an engine process has exited."""

    reason: str
    permanent: bool
    """Whether a restart would fail in the same way."""


class Engines:
    """The engine processes of all replicas."""

    def __init__(self, configs: Sequence[EngineConfig], directory: str, command: Sequence[str]) -> None:
        """configs: one per replica; command: starts an engine process."""
        server = configs[0].server
        self._replicas = [
            _Replica(number, config, RestartPolicy(server.replica_restarts, server.replica_restart_pause))
            for number, config in enumerate(configs)
        ]
        self._directory = directory
        self._command = command
        self._notify_front_ends: Callable[[EngineEvent], None] = lambda _: None
        self._draining = asyncio.Event()
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, notify_front_ends: Callable[[EngineEvent], None]) -> list[Started]:
        """Start all engine processes and wait until all accept requests. Raises EngineError when one cannot start.

        notify_front_ends: called, now and later, when a replica begins or ceases to accept requests.
        """
        self._notify_front_ends = notify_front_ends
        self._tasks = [asyncio.create_task(self._supervise(replica)) for replica in self._replicas]
        return await asyncio.gather(*(replica.first_start for replica in self._replicas))

    def broadcast(self, message: FrontEndExited | Shutdown) -> None:
        """Send a message to all engine processes."""
        for replica in self._replicas:
            if replica.child is not None:
                replica.child.send(message)

    @property
    def any_down(self) -> bool:
        """Whether a replica accepts no requests."""
        return any(replica.ready_since is None for replica in self._replicas)

    def drain(self) -> None:
        """Start no more processes, and kill those that are still loading."""
        self._draining.set()
        for replica in self._replicas:
            if replica.child is not None and replica.ready_since is None:
                replica.child.kill()

    async def shutdown(self, seconds: float) -> None:
        """Stop all engine processes and log those that need more than `seconds`, which `kill` ends."""
        self._draining.set()
        self._stopped = True
        self.broadcast(Shutdown())
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            processes = "the engine process" if len(self._replicas) == 1 else f"{len(late)} engine processes"
            log.warning("%s did not stop within %g s; killing", processes, seconds)

    def kill(self) -> None:
        """Kill all engine processes and wait until they have exited."""
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            if replica.child is not None:
                replica.child.kill_and_reap()

    async def _supervise(self, replica: _Replica) -> None:
        """Run the engine processes of a replica, one after another, until no restart is due."""
        down = EngineDown("", 0.0, replica.number)
        while True:
            exited = await self._run_process(replica)
            if not replica.first_start.done():
                reason = exited.reason if len(self._replicas) == 1 else f"replica {replica.number}: {exited.reason}"
                replica.first_start.set_exception(EngineError(reason))
                return
            ready_since, replica.ready_since = replica.ready_since, None
            since = down.since if ready_since is None else time.time()
            uptime = 0.0 if ready_since is None else time.monotonic() - ready_since
            delay = None if exited.permanent or self._draining.is_set() else replica.restarts.next_delay(uptime)
            down = EngineDown(
                exited.reason,
                since,
                replica.number,
                replica.incarnation,
                will_restart=delay is not None,
                restart=self._restart_state(replica.restarts, delay, exited.permanent),
            )
            if not self._stopped:
                restart = f"; restart: {down.restart}" if down.restart else ""
                log.error("%s failed: %s%s", self._name(replica), exited.reason, restart)
            self._notify_front_ends(down)
            await self._clean_up(replica)
            if delay is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), delay)
            if self._draining.is_set():
                return
            replica.incarnation += 1
            restart = f"try {replica.restarts.tries} of {replica.restarts.max_tries}"
            self._notify_front_ends(replace(down, incarnation=replica.incarnation, starting=True, restart=restart))

    async def _run_process(self, replica: _Replica) -> _Exit:
        """Start one engine process and wait until it has exited."""
        launch = EngineLaunch(
            config=replica.config, directory=self._directory, replica=replica.number, incarnation=replica.incarnation
        )
        replica.child = None
        try:
            child = replica.child = await Child[EngineToSupervisor].start(
                self._command, EngineToSupervisor, launch, leads_group=True
            )
        except OSError as error:  # no resources for a process, perhaps for a moment
            return _Exit(f"its process could not be started: {error}", permanent=False)
        failure, permanent = "", False
        watch: asyncio.Task[str] | None = None
        try:
            async for message in child.messages():
                match message:
                    case Started():
                        replica.ready_since = time.monotonic()
                        watch = asyncio.create_task(self._watch(replica, child))
                        if replica.incarnation:
                            log.warning("%s accepts requests again", self._name(replica))
                        self._notify_front_ends(message)
                        if not replica.first_start.done():
                            replica.first_start.set_result(message)
                    case Failed(failure, permanent):
                        pass
        except EngineError as unreadable:
            failure = str(unreadable)
            child.kill_and_reap()
        finally:
            if watch is not None:
                watch.cancel()
        if watch is not None and watch.done() and not watch.cancelled():
            failure = watch.result()
        if not replica.first_start.done():
            exit_status = f"{self._name(replica)} could not start: its process {child.exit_status}"
        else:
            exit_status = f"its process {child.exit_status}"
            if replica.ready_since is None:
                exit_status += " while it started"
        return _Exit(failure or exit_status, permanent)

    async def _watch(self, replica: _Replica, child: Child[EngineToSupervisor]) -> str:
        """Kill an engine process whose loop has not run for server.engine_timeout; why, as a sentence."""
        timeout = replica.config.server.engine_timeout
        if not timeout:
            await asyncio.Event().wait()  # until it is cancelled
        heartbeat = Heartbeat.map(self._directory, replica.number)
        seconds = await Silence().lasts(lambda: heartbeat.loop, timeout)
        child.kill()
        return f"its loop was stuck for {seconds:g} s (server.engine_timeout), so its process was killed"

    async def _clean_up(self, replica: _Replica) -> None:
        """Wait until nothing is left of an exited engine process, so that the next one finds its devices free."""
        if replica.child is None:
            return
        killed = asyncio.ensure_future(replica.child.kill_process_group())
        try:
            if not (await asyncio.wait([killed], timeout=SLOW_EXIT))[0]:
                log.warning("processes left by %s were killed but have not exited yet", self._name(replica))
            await killed
        finally:
            killed.cancel()
        (Path(self._directory) / SOCKET.format(replica.number, replica.incarnation)).unlink(missing_ok=True)

    def _restart_state(self, restarts: RestartPolicy, delay: float | None, permanent: bool) -> str:
        """What happens after an exit, in a few words."""
        if restarts.max_tries <= 0:
            return ""
        if delay is not None:
            return f"in {delay:g} s, try {restarts.tries} of {restarts.max_tries}"
        if self._draining.is_set():
            return "none, the server is shutting down"
        if permanent:
            return "none, it would fail again"
        return f"none, given up after try {restarts.max_tries} of {restarts.max_tries} (server.replica_restarts)"

    def _name(self, replica: _Replica) -> str:
        return "the engine" if len(self._replicas) == 1 else f"replica {replica.number} of the engine"
