"""The engine processes, seen from the supervisor: started, started anew when they die, stopped."""

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
from engine.server.shared.messages import SOCKET, EngineGone, EngineLaunch, Failed, FromEngine, Gone, Shutdown, Started
from engine.server.supervisor.child import Child
from engine.server.supervisor.restarts import Restarts

LONG = 10.0
"""Seconds after which what a dead process has left, and what does not end, is worth a word in the log."""

log = logging.getLogger(__name__)

News = Started | EngineGone


@define(eq=False)
class _Replica:
    """A replica, and the engine process that it has now."""

    number: int
    config: EngineConfig
    restarts: Restarts
    first: asyncio.Future[Started] = field(factory=asyncio.Future)
    """What its first process says."""
    life: int = 0
    """Which process it is, from 0 on."""
    child: Child[FromEngine] | None = None
    begun: float | None = None
    """Since when it takes requests, time.monotonic(); None: it does not."""


@frozen
class _End:
    """How an engine process has ended."""

    reason: str
    for_good: bool
    """Whether the next one would end so too."""


class Engines:
    """All replicas of the engine."""

    def __init__(self, configs: Sequence[EngineConfig], directory: str, command: Sequence[str]) -> None:
        """configs: of each replica; command: starts an engine process."""
        server = configs[0].server
        # The only replica stays dead: what runs the server sees to that, by /health, and knows best.
        most = server.replica_restarts if len(configs) > 1 else 0
        self._replicas = [
            _Replica(number, config, Restarts(most, server.replica_restart_pause))
            for number, config in enumerate(configs)
        ]
        self._directory = directory
        self._command = command
        self._tell_fronts: Callable[[News], None] = lambda _: None
        self._draining = asyncio.Event()
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, tell_fronts: Callable[[News], None]) -> list[Started]:
        """Start all, and wait until they take requests; what each has said. Raises EngineError when one cannot start.

        tell_fronts: is told, now and later, which replica takes requests and which is dead.
        """
        self._tell_fronts = tell_fronts
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        return await asyncio.gather(*(replica.first for replica in self._replicas))

    def tell(self, message: Gone | Shutdown) -> None:
        """Tell all that there are."""
        for replica in self._replicas:
            if replica.child is not None:
                replica.child.send(message)

    @property
    def failed(self) -> bool:
        """Whether one takes no requests."""
        return any(replica.begun is None for replica in self._replicas)

    def drain(self) -> None:
        """The server is to end: start none anew, and none that is starting goes on."""
        self._draining.set()
        for replica in self._replicas:
            if replica.child is not None and replica.begun is None:
                replica.child.strike()

    async def shutdown(self, seconds: float) -> None:
        """Stop all; those that take longer are killed."""
        self._draining.set()
        self._stopped = True
        self.tell(Shutdown())
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            many = "the engine process" if len(self._replicas) == 1 else f"{len(late)} engine processes"
            log.warning("%s did not stop within %g s and is killed", many, seconds)

    def kill(self) -> None:
        """Leave nothing behind, at once."""
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            if replica.child is not None:
                replica.child.kill()

    async def _keep(self, replica: _Replica) -> None:
        """Run engine processes of this replica, one after the other."""
        gone = EngineGone("", 0.0, replica.number)
        while True:
            end = await self._live(replica)
            if not replica.first.done():
                words = end.reason if len(self._replicas) == 1 else f"replica {replica.number}: {end.reason}"
                replica.first.set_exception(EngineError(words))
                return
            begun, replica.begun = replica.begun, None
            since = gone.since if begun is None else time.time()
            lived = 0.0 if begun is None else time.monotonic() - begun
            pause = None if end.for_good or self._draining.is_set() else replica.restarts.next(lived)
            gone = EngineGone(
                end.reason,
                since,
                replica.number,
                replica.life,
                coming=pause is not None,
                restart=self._outlook(replica.restarts, pause, end.for_good),
            )
            if not self._stopped:
                log.error(
                    "%s is gone: %s%s", self._name(replica), end.reason, gone.restart and f"; restart: {gone.restart}"
                )
            self._tell_fronts(gone)
            await self._clear(replica)
            if pause is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), pause)
            if self._draining.is_set():
                return
            replica.life += 1
            restart = f"try {replica.restarts.tried} of {replica.restarts.most}"
            self._tell_fronts(replace(gone, life=replica.life, starting=True, restart=restart))

    async def _live(self, replica: _Replica) -> _End:
        """The life of one engine process."""
        launch = EngineLaunch(
            config=replica.config, directory=self._directory, replica=replica.number, life=replica.life
        )
        replica.child = None
        try:
            engine = replica.child = await Child[FromEngine].start(self._command, FromEngine, launch, leads=True)
        except OSError as error:  # no room for a process, perhaps for a moment
            return _End(f"its process could not be started: {error}", for_good=False)
        last_words, for_good = "", False
        try:
            async for message in engine.messages():
                match message:
                    case Started():
                        replica.begun = time.monotonic()
                        if replica.life:
                            log.warning("%s takes requests again", self._name(replica))
                        self._tell_fronts(message)
                        if not replica.first.done():
                            replica.first.set_result(message)
                    case Failed(last_words, for_good):
                        pass
        except EngineError as unreadable:
            last_words = str(unreadable)
            engine.kill()
        if not replica.first.done():
            fate = f"{self._name(replica)} could not start: its process {engine.fate}"
        else:
            fate = f"its process {engine.fate}" + ("" if replica.begun is not None else " while it started")
        return _End(last_words or fate, for_good)

    async def _clear(self, replica: _Replica) -> None:
        """Wait until nothing is left of a dead engine process, so that the next one finds its devices free."""
        if replica.child is None:
            return
        ended = asyncio.ensure_future(replica.child.end_family())
        try:
            if not (await asyncio.wait([ended], timeout=LONG))[0]:
                log.warning("processes that %s has left behind do not end though they were killed", self._name(replica))
            await ended
        finally:
            ended.cancel()
        (Path(self._directory) / SOCKET.format(replica.number, replica.life)).unlink(missing_ok=True)

    def _outlook(self, restarts: Restarts, pause: float | None, for_good: bool) -> str:
        """What is done about a death, in a few words."""
        if restarts.most <= 0:
            return ""
        if pause is not None:
            return f"in {pause:g} s, try {restarts.tried} of {restarts.most}"
        if self._draining.is_set():
            return "none, the server is shutting down"
        if for_good:
            return "none, it would fail again"
        return f"none, given up after try {restarts.most} of {restarts.most} (server.replica_restarts)"

    def _name(self, replica: _Replica) -> str:
        return "the engine" if len(self._replicas) == 1 else f"replica {replica.number} of the engine"
