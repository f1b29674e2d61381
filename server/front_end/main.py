"""Entry point of a front end process: answers HTTP on connections that the supervisor has accepted.

Run as `python -m engine.server.front_end` by the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from engine.core.collector import finish_start
from engine.core.config import ModelConfig
from engine.core.errors import EngineError
from engine.core.logs import front_end_process
from engine.core.parsers import Parser
from engine.core.plugin_host import Plugins, choose_parser, load_plugins
from engine.core.text import Tokenizer
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.logs import configure_logs
from engine.server.front_end.receiver import ConnectionReceiver, connection_capacity
from engine.server.front_end.request_trace import Tracer
from engine.server.front_end.trace_exporter import open_exporter
from engine.server.http.app import make_app
from engine.server.http.service import Service
from engine.server.shared.descriptors import descriptor_limit
from engine.server.shared.exit_limit import limit_exit
from engine.server.shared.limits_table import LimitsTable, has_limits
from engine.server.shared.messages import (
    LIMITS_FILE,
    METRICS_FILE,
    Drain,
    Drained,
    EngineDown,
    EngineEvent,
    Failed,
    FrontEndLaunch,
    Ready,
    Shutdown,
    Started,
    SupervisorToFrontEnd,
)
from engine.server.shared.metrics_table import HEARTBEAT_INTERVAL, MetricsTable
from engine.server.shared.supervisor_link import SupervisorLink
from engine.server.shared.tls import tls_context

ERROR_EVENT_TIMEOUT = 2.0
"""Seconds in which streams that ran out of time must send their error events."""

FLUSH_TIMEOUT = 2.0
"""Seconds in which the last traces must be sent; a collector that is down must not delay the end."""

log = logging.getLogger(__name__)

OpenTokenizer = Callable[[ModelConfig], Tokenizer]


def main() -> int:
    """Run until the supervisor says Shutdown; the exit code."""
    return run(Tokenizer.of_model)


def run(open_tokenizer: OpenTokenizer) -> int:
    """Run the process with the tokenizer that `open_tokenizer` returns; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the supervisor handles them
        signal.signal(number, signal.SIG_IGN)
    supervisor: SupervisorLink[SupervisorToFrontEnd] = SupervisorLink(SupervisorToFrontEnd)
    launch: FrontEndLaunch = supervisor.launch(FrontEndLaunch)
    configure_logs(front_end_process(launch.row), launch.config.server)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_FrontEnd(supervisor, launch).run(open_tokenizer))


class _FrontEnd:
    """The state of the process."""

    def __init__(self, supervisor: SupervisorLink[SupervisorToFrontEnd], launch: FrontEndLaunch) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._config = launch.config
        self._messages: asyncio.Queue[SupervisorToFrontEnd] = asyncio.Queue()
        """Messages from the supervisor."""
        metrics = MetricsTable.map(Path(launch.directory) / METRICS_FILE, launch.rows, launch.config.server.replicas)
        self._client = EngineClient(launch.config, metrics, launch.row)
        self._channel = socket.socket(fileno=launch.connections)

    async def run(self, open_tokenizer: OpenTokenizer) -> int:
        """Load the tokenizer, wait for the engine, and serve; the exit code."""
        loop = asyncio.get_running_loop()

        def receive(message: SupervisorToFrontEnd) -> None:
            with suppress(RuntimeError):  # the event loop is closed: this process is about to exit
                loop.call_soon_threadsafe(self._messages.put_nowait, message)

        self._supervisor.listen(receive, self._launch.directory)
        self._client.metrics.pid = os.getpid()
        self._beat()
        code = 1
        try:
            tokenizer, parser, plugins = await asyncio.to_thread(self._load, open_tokenizer)
            started = await self._wait_for_engines()
            if started is not None:
                with self._tracer() as tracer:
                    service = Service(
                        self._config, self._client, tokenizer, started, self._launch.created, parser, tracer
                    )
                    await self._serve(service, plugins)
            code = 0
        except EngineError as error:
            self._supervisor.send(Failed(str(error)))
        finally:
            limit_exit(code)
            self._client.close()
        return code

    @contextmanager
    def _tracer(self) -> Generator[Tracer | None, None, None]:
        """Begins the traces of requests; None: they are not traced. Traces are sent at the end of the block.

        Raises ConfigError.
        """
        if not self._config.server.otlp_endpoint:
            yield None
            return
        exporter = open_exporter(self._config.server, self._launch.name, self._client.metrics.count_lost_traces)
        try:
            yield Tracer(self._config.server.trace_sample, exporter.put)
        finally:
            exporter.close(FLUSH_TIMEOUT)

    def _load(self, open_tokenizer: OpenTokenizer) -> tuple[Tokenizer, Parser[Any], Plugins]:
        """The tokenizer, the output parser for its templates, and the plugins. Raises EngineError."""
        tokenizer = open_tokenizer(self._config.model)
        plugins = load_plugins(self._config.plugins, quiet=True)
        parser, choice = choose_parser(self._config, plugins, tokenizer.templates)
        if choice.notice and self._launch.row == 0:
            log.warning("%s", choice.notice)
        log.info("%s reads the outputs: %s", choice, choice.reason)
        return tokenizer, parser, plugins

    def _beat(self) -> None:
        """Record that the event loop runs, for the supervisor; schedules its next call."""
        self._client.metrics.beat()
        self._client.phases.update()
        asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL, self._beat)

    async def _wait_for_engines(self) -> Started | None:
        """Wait until each replica has started once; one replica's message, or None if Shutdown comes first."""
        while not all(link.started for link in self._client.links):
            match await self._messages.get():
                case Started() | EngineDown() as event:
                    self._update_replica(event)
                case Shutdown():
                    return None
        return self._client.links[0].started

    def _update_replica(self, event: EngineEvent) -> None:
        """Connect to a replica that has started, or mark a replica down."""
        match event:
            case Started():
                self._client.connect(self._launch.directory, self._launch.name, event)
            case EngineDown():
                self._client.mark_down(event)

    async def _serve(self, service: Service, plugins: Plugins) -> None:
        """Answer HTTP until Shutdown. Raises ConfigError when there are too few file descriptors."""
        capacity = connection_capacity(self._config.server)
        if self._launch.row == 0 and capacity < self._config.server.max_connections:
            log.warning(
                "each front end accepts at most %d connections rather than %d (server.max_connections), because the "
                "limit of open files (ulimit -n) is %d; raise that limit, or lower the setting",
                capacity,
                self._config.server.max_connections,
                descriptor_limit(),
            )
        server = _Uvicorn(
            uvicorn.Config(
                make_app(service, self._launch.api_keys, self._limits_table(), plugins, warn=self._launch.row == 0),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level=self._config.server.log_level,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        http = asyncio.ensure_future(server.serve(sockets=[]))
        while not server.started:
            await asyncio.sleep(0)
        receiver = ConnectionReceiver(
            server,
            self._config.server,
            self._client.metrics,
            self._channel,
            capacity,
            tls_context(self._config.server),
        )
        receiver.start()
        finish_start(freeze=self._config.server.gc_freeze)
        self._client.metrics.gc_pauses.listen()
        self._supervisor.send(Ready())
        draining: asyncio.Task[None] | None = None
        while True:
            match await self._messages.get():
                case Started() | EngineDown() as event:
                    self._update_replica(event)
                case Drain():
                    draining = asyncio.create_task(self._drain(service))
                case Shutdown():
                    break
        receiver.stop()
        if draining is not None:
            draining.cancel()
        server.should_exit = True
        await http

    def _limits_table(self) -> LimitsTable | None:
        """This front end's view of the counts of each API key, if there are limits."""
        if not has_limits(self._config.server):
            return None
        launch = self._launch
        return LimitsTable.map(Path(launch.directory) / LIMITS_FILE, launch.rows, len(launch.api_keys), launch.row)

    async def _drain(self, service: Service) -> None:
        """Refuse new requests, wait for running ones at most server.shutdown_timeout, then end them with an error."""
        service.draining = True
        timeout = self._config.server.shutdown_timeout
        if service.active:
            log.warning("shutting down: waiting up to %g s for %d requests", timeout, service.active)
        if not await _wait_until_idle(service, timeout):
            message = f"the server is shutting down, and this request did not finish within {timeout:g} s"
            self._client.fail(ApiError(503, message, code="shutting_down"))
            await _wait_until_idle(service, ERROR_EVENT_TIMEOUT)
        self._supervisor.send(Drained())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor handles signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _wait_until_idle(service: Service, seconds: float) -> bool:
    """Wait until all responses are sent; False: some are not after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.active:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop event loops; None, for asyncio's own, if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:  # not available for every platform
        return None
    return uvloop.new_event_loop
