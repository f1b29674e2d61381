"""The front ends, seen from the supervisor: started, given connections, replaced when they die, drained."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from itertools import chain

from attrs import define, field

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.server.shared.messages import (
    Drain,
    Drained,
    EngineGone,
    Failed,
    FromFrontEnd,
    FrontEndLaunch,
    Gone,
    Ready,
    Shutdown,
    Started,
)
from engine.server.shared.metrics_table import Board, Metrics
from engine.server.supervisor.child import Child

RESTART_INTERVAL = 1.0
"""Seconds from one start of a front end to the next in its place, at least."""
GRACE = 5.0
"""Seconds beyond its own time limit that a front end gets to say that it is drained."""
RETRY = 0.005
"""Seconds until a connection is offered again, when no front end could take it."""

log = logging.getLogger(__name__)


@define(eq=False)
class _Place:
    """A row of the board, and the front end that has it now."""

    row: int
    numbers: Metrics
    child: Child[FromFrontEnd] | None = None
    channel: socket.socket | None = None
    """Where connections are passed on; None while the front end cannot take any."""
    given: int = 0
    """Connections it has been given so far, dead ones before it included."""
    ready: asyncio.Event = field(factory=asyncio.Event)
    drained: asyncio.Event = field(factory=asyncio.Event)

    @property
    def connections(self) -> int:
        """Those it has."""
        return self.given - self.numbers.closed


class FrontEnds:
    """All front ends of a server."""

    def __init__(
        self,
        config: EngineConfig,
        directory: str,
        board: Board,
        command: Sequence[str],
        tell_engine: Callable[[Gone], None],
    ) -> None:
        """board: with a row for each; command: starts one; tell_engine: is told when one has died."""
        self._config = config
        self._directory = directory
        self._command = command
        self._tell_engine = tell_engine
        self._places = [_Place(row, numbers) for row, numbers in enumerate(board.fronts)]
        self._created = int(time.time())
        self._lives = 0
        self._news: dict[int, list[Started | EngineGone]] = {}
        """Of each replica, what a front end that starts later must know too."""
        self._draining = False
        self.stopped = False
        """Whether they have been told to stop."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all, and wait until they are ready. Raises EngineError when one cannot start."""
        self._tasks = [asyncio.create_task(self._keep(place)) for place in self._places]
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

    def tell(self, news: Started | EngineGone) -> None:
        """Tell all, now and later."""
        old = self._news.get(news.replica, [])
        started = [] if isinstance(news, Started) else [each for each in old if isinstance(each, Started)]
        self._news[news.replica] = [*started, news]
        self._send(news)

    async def accept(self, listener: socket.socket) -> None:
        """Give each new connection to the front end that has the fewest.

        Connections live long, so each front end should have the same number. The kernel cannot see to that: of 256
        connections hashed to 4 listening sockets one gets 72 as a rule, and of one listening socket that all share, the
        first to wake takes what it can.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no more file descriptors, or a client that has gone already
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(RETRY)
                continue
            with connection:
                while not self._give(connection):
                    await asyncio.sleep(RETRY)

    async def drain(self) -> None:
        """Let all finish what runs, within server.shutdown_timeout, and refuse what is new."""
        self._draining = True
        self._send(Drain())
        waits = [asyncio.ensure_future(place.drained.wait()) for place in self._places if place.child is not None]
        if waits:
            _, late = await asyncio.wait(waits, timeout=self._config.server.shutdown_timeout + GRACE)
            for wait in late:
                wait.cancel()

    async def shutdown(self, seconds: float) -> None:
        """Stop all; those that take longer are killed."""
        self.stopped = True
        self._send(Shutdown())
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            log.warning("%d front ends did not stop within %g s and are killed", len(late), seconds)

    def kill(self) -> None:
        """Leave nothing behind, at once."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()
        for place in self._places:
            if place.child is not None:
                place.child.kill()
            if place.channel is not None:
                place.channel.close()

    async def _all_ready(self) -> None:
        for place in self._places:
            await place.ready.wait()

    def _send(self, message: object) -> None:
        for place in self._places:
            if place.child is not None:
                place.child.send(message)

    def _give(self, connection: socket.socket) -> bool:
        for place in sorted(self._places, key=lambda place: place.connections):
            if place.channel is not None:
                try:
                    socket.send_fds(place.channel, [b"c"], [connection.fileno()])
                except OSError as error:  # it is busy and has not taken the last ones, or dying
                    log.debug("front end %d takes no connection: %s", place.row, error)
                    continue
                place.given += 1
                return True
        return False

    async def _keep(self, place: _Place) -> None:
        """Run front ends in this place, one after the other. Raises EngineError when the first cannot start."""
        while True:
            begun = time.monotonic()
            fate = await self._live(place)
            if self.stopped:
                return
            if not place.ready.is_set():
                raise EngineError(fate)
            log.error("%s; its requests are lost, and another takes its place", fate)
            await asyncio.sleep(begun + RESTART_INTERVAL - time.monotonic())

    async def _live(self, place: _Place) -> str:
        """The life of one front end; how it ended, as a sentence."""
        self._lives += 1
        name = f"{place.row}.{self._lives}"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                launch = FrontEndLaunch(
                    config=self._config,
                    directory=self._directory,
                    name=name,
                    row=place.row,
                    rows=len(self._places),
                    connections=theirs.fileno(),
                    created=self._created,
                )
                child = await Child[FromFrontEnd].start(self._command, FromFrontEnd, launch, [theirs.fileno()])
            place.child = child
            for news in chain.from_iterable(self._news.values()):
                child.send(news)
            if self._draining:
                child.send(Drain())
            last_words = ""
            try:
                async for message in child.messages():
                    match message:
                        case Ready():
                            place.channel = ours
                            place.ready.set()
                        case Drained():
                            place.drained.set()
                        case Failed(error):
                            last_words = error
            finally:
                place.channel = None
        if self._draining:
            place.drained.set()
        place.child = None
        place.given = place.numbers.closed
        place.numbers.bury()
        self._tell_engine(Gone(name))
        return last_words or f"a front end {child.fate}"
