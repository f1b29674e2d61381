"""The server's main process: starts the engine process, answers HTTP, and goes down in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from engine.core.config import EngineConfig, ServerConfig
from engine.core.errors import ConfigError
from engine.core.text import Tokenizer
from engine.server.app import make_app
from engine.server.engine_client import COMMAND, EngineClient
from engine.server.errors import ApiError
from engine.server.messages import Started
from engine.server.metrics import Metrics
from engine.server.service import Service
from engine.server.summary import summary

LAST_WORDS = 2.0
"""Seconds for the error events of streams that ran out of time."""

log = logging.getLogger(__name__)


def serve(config: EngineConfig, *, announce: Callable[[str], None], command: Sequence[str] = COMMAND) -> int:
    """Serve until told to stop; the exit code: 0 after SIGTERM or SIGINT, 1 when the engine failed meanwhile.

    announce: given the summary when the server is ready. command: starts the engine process.
    Raises EngineError, with the engine process's own words, when the server cannot start.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s server: %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(config, announce, command).run())


class _Server:
    """One life of the server."""

    def __init__(self, config: EngineConfig, announce: Callable[[str], None], command: Sequence[str]) -> None:
        self._config = config
        self._announce = announce
        self._client = EngineClient(config, Metrics(), command)
        self._stop = asyncio.Event()
        self._signal = 0

    async def run(self) -> int:
        """Returns the exit code; raises EngineError when the server cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        with _bind(self._config.server) as listener:
            try:
                return await self._run(listener)
            finally:
                await self._client.close()

    async def _run(self, listener: socket.socket) -> int:
        start = asyncio.ensure_future(self._start())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            with suppress(asyncio.CancelledError):
                await start
            return 128 + self._signal
        started, tokenizer = start.result()
        service = Service(self._config, self._client, tokenizer, started)
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
        http = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not http.done():
            await asyncio.sleep(0.01)
        if not http.done():
            self._announce(summary(started, self._config, _url(listener)))
            await asyncio.wait((http, stop), return_when=asyncio.FIRST_COMPLETED)
            await self._drain(service)
        server.should_exit = True
        await http
        return 0 if self._client.failure is None else 1

    async def _start(self) -> tuple[Started, Tokenizer]:
        """The engine and the tokenizer, loaded side by side."""
        tokenizer = asyncio.to_thread(Tokenizer.of_model, self._config.model)
        started, opened = await asyncio.gather(self._client.start(), tokenizer)
        return started, opened

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

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._client.kill()
            os._exit(128 + number)
        self._signal = number
        self._stop.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: this process drains first."""

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


def _bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound before anything is loaded, so that a taken port is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}, port {config.port} ({error.strerror}); "
            "choose another address by --host or --port (0: any free port)"
        ) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    return uvloop.new_event_loop
