"""A front end process: answers HTTP on connections that the supervisor has accepted, with a tokenizer of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from engine.core.config import ModelConfig
from engine.core.errors import EngineError
from engine.core.text import Tokenizer
from engine.server.front_end.connections import Connections
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.http.app import make_app
from engine.server.http.service import Service
from engine.server.shared.control import Control
from engine.server.shared.messages import (
    BOARD,
    Drain,
    Drained,
    EngineGone,
    Failed,
    FrontEndLaunch,
    Ready,
    Shutdown,
    Started,
    ToFrontEnd,
)
from engine.server.shared.metrics_table import Board

LAST_WORDS = 2.0
"""Seconds for the error events of streams that ran out of time."""

log = logging.getLogger(__name__)

OpenTokenizer = Callable[[ModelConfig], Tokenizer]


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return run(Tokenizer.of_model)


def run(open_tokenizer: OpenTokenizer) -> int:
    """The whole life of the process, with the tokenizer that `open_tokenizer` gives."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s server: %(message)s")
    control: Control[ToFrontEnd] = Control(ToFrontEnd)
    launch: FrontEndLaunch = control.launch(FrontEndLaunch)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_FrontEnd(control, launch).run(open_tokenizer))


class _FrontEnd:
    """One life of the process."""

    def __init__(self, control: Control[ToFrontEnd], launch: FrontEndLaunch) -> None:
        self._control = control
        self._launch = launch
        self._config = launch.config
        self._told: asyncio.Queue[ToFrontEnd] = asyncio.Queue()
        board = Board.map(Path(launch.directory) / BOARD, launch.rows, launch.config.server.replicas)
        self._client = EngineClient(launch.config, board, launch.row)
        self._channel = socket.socket(fileno=launch.connections)

    async def run(self, open_tokenizer: OpenTokenizer) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()

        def told(message: ToFrontEnd) -> None:
            loop.call_soon_threadsafe(self._told.put_nowait, message)

        self._control.listen(told, self._launch.directory)
        try:
            tokenizer = await asyncio.to_thread(open_tokenizer, self._config.model)
        except EngineError as error:
            self._control.send(Failed(str(error)))
            return 1
        try:
            started = await self._engines()
            if started is not None:
                await self._serve(Service(self._config, self._client, tokenizer, started, self._launch.created))
        finally:
            self._client.close()
        return 0

    async def _engines(self) -> Started | None:
        """Wait until all replicas have started once; what one has said, or None when this process is to stop before."""
        while not all(link.started for link in self._client.links):
            match await self._told.get():
                case Started() | EngineGone() as news:
                    self._follow(news)
                case Shutdown():
                    return None
        return self._client.links[0].started

    def _follow(self, news: Started | EngineGone) -> None:
        """A replica takes requests, or none any more."""
        match news:
            case Started():
                self._client.open(self._launch.directory, self._launch.name, news)
            case EngineGone():
                self._client.bury(news)

    async def _serve(self, service: Service) -> None:
        """Answer until told to shut down."""
        server = _Uvicorn(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )
        http = asyncio.ensure_future(server.serve(sockets=[]))
        while not server.started:
            await asyncio.sleep(0)
        take_over = Connections(server, self._client.metrics.connection_closed, self._channel).take_over
        self._channel.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel, take_over)
        gc.collect()
        gc.freeze()  # what start-up made lives on; later collections need not look at it
        self._control.send(Ready())
        draining: asyncio.Task[None] | None = None
        while True:
            match await self._told.get():
                case Started() | EngineGone() as news:
                    self._follow(news)
                case Drain():
                    draining = asyncio.create_task(self._drain(service))
                case Shutdown():
                    break
        loop.remove_reader(self._channel)
        if draining is not None:
            draining.cancel()
        server.should_exit = True
        await http

    async def _drain(self, service: Service) -> None:
        """Refuse new work, let what runs finish within the time, then end it."""
        service.draining = True
        timeout = self._config.server.shutdown_timeout
        if service.active:
            log.warning("shutting down: %d requests get %g s to finish", service.active, timeout)
        if not await _idle(service, timeout):
            message = f"the server is shutting down, and this request did not finish within {timeout:g} s"
            self._client.fail(ApiError(503, message, code="shutting_down"))
            await _idle(service, LAST_WORDS)
        self._control.send(Drained())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


async def _idle(service: Service, seconds: float) -> bool:
    """Whether all answers are sent within the time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.active:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loops, where there are any."""
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
