"""The supervisor, the server's main process.

Starts engine processes and front ends, passes accepted connections to the front ends, and at the end drains the front
ends and stops all processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from engine.core.config import EngineConfig, ServerConfig, is_hub_name
from engine.core.hub import locate
from engine.core.logs import configure, supervisor_process
from engine.core.startup import Listener
from engine.core.startup_display import show_startup
from engine.server.shared.descriptors import raise_descriptor_limit
from engine.server.shared.messages import METRICS_FILE
from engine.server.shared.metrics_table import MetricsTable
from engine.server.shared.tls import tls_context
from engine.server.supervisor import listener
from engine.server.supervisor.child import become_subreaper
from engine.server.supervisor.engines import Engines
from engine.server.supervisor.front_ends import FrontEnds
from engine.server.supervisor.replicas import cores, count_gpus, finds_devices, replica_configs
from engine.server.supervisor.service_manager import notify
from engine.server.supervisor.summary import summary

SHUTDOWN_SECONDS = 5.0
"""Seconds in which a drained process must exit before it is killed."""

log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Commands:
    """Command lines that start the two kinds of child processes.

    -P keeps the working directory off the import path: a user's own engine.py there must not be imported.
    """

    engine: Sequence[str] = (sys.executable, "-P", "-m", "engine.server.engine_process")
    front_end: Sequence[str] = (sys.executable, "-P", "-m", "engine.server.front_end")


def serve(config: EngineConfig, *, announce: Callable[[str], None], commands: Commands) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 1 if an engine process was down then.

    announce: called with the summary when the server is ready.
    Raises EngineError with the failing process's error, or why a model is not downloaded, when the server cannot start.
    """
    configure(supervisor_process(), style=config.server.log_format, level=config.server.log_level)
    raise_descriptor_limit()
    config = _located(config)
    replicas = replica_configs(config, count_gpus, finds_devices)
    become_subreaper()
    return asyncio.run(_Server(config, replicas, announce, commands).run())


def _located(config: EngineConfig) -> EngineConfig:
    """The configuration with directories in place of names on the hub; downloads what is not on disk."""
    if not any(map(is_hub_name, (config.model.path, config.model.tokenizer))):
        return attrs.evolve(config, model=locate(config.model))
    # Bound for a moment, so that an address in use is reported before a long download.
    with listener.bound(config.server), _show_download(config.server) as on_progress:
        return attrs.evolve(config, model=locate(config.model, on_progress))


def _show_download(config: ServerConfig) -> AbstractContextManager[Listener]:
    return show_startup(prefix="", logged=config.log_format == "json")


class _Server:
    """The state of one running server."""

    def __init__(
        self,
        config: EngineConfig,
        replicas: Sequence[EngineConfig],
        announce: Callable[[str], None],
        commands: Commands,
    ) -> None:
        self._replicas = replicas
        self._config = config
        self._announce = announce
        self._commands = commands
        self._directory = tempfile.mkdtemp(prefix="engine-")  # mode 0700: no other user can connect
        self._engines: Engines | None = None
        self._front_ends: FrontEnds | None = None
        self._stop = asyncio.Event()
        self._signal = 0

    async def run(self) -> int:
        """Serve; the exit code. Raises EngineError when the server cannot start."""
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            tls_context(self._config.server)  # so that a faulty certificate is reported before anything is loaded
            with listener.bound(self._config.server) as bound:
                return await self._run(bound)
        finally:
            self._kill()

    async def _run(self, bound: socket.socket) -> int:
        num_rows = num_front_ends(self._config.server)
        metrics = MetricsTable.map(Path(self._directory) / METRICS_FILE, num_rows, len(self._replicas), create=True)
        engines = self._engines = Engines(self._replicas, self._directory, self._commands.engine)
        front_ends = self._front_ends = FrontEnds(
            self._config, self._directory, metrics, self._commands.front_end, engines.broadcast
        )
        stop = asyncio.ensure_future(self._stop.wait())
        start = asyncio.gather(engines.start(front_ends.notify), front_ends.start())
        accept: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                return 128 + self._signal
            started, _ = start.result()
            bound.listen(2048)
            bound.setblocking(False)
            accept = asyncio.ensure_future(front_ends.accept(bound))
            slowest = max(started, key=lambda each: each.seconds)
            self._announce(summary(slowest, self._config, listener.url(bound, self._config.server)))
            notify("READY=1")
            await asyncio.wait((stop, accept), return_when=asyncio.FIRST_COMPLETED)
            notify("STOPPING=1")
            engines.drain()
            await front_ends.drain()
            code = 1 if engines.any_down else 0
            accept.cancel()
            bound.close()
            await asyncio.gather(front_ends.shutdown(SHUTDOWN_SECONDS), engines.shutdown(SHUTDOWN_SECONDS))
            return code
        finally:
            tasks: list[asyncio.Future[Any]] = [stop, start, *([] if accept is None else [accept])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _kill(self) -> None:
        """Kill all child processes and remove the directory."""
        if self._front_ends is not None:
            self._front_ends.kill()
        if self._engines is not None:
            self._engines.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._kill()
            os._exit(128 + number)
        self._signal = number
        self._stop.set()


def num_front_ends(config: ServerConfig) -> int:
    """Number of front ends: as configured, or one per 4 cores, from 1 to 4."""
    return config.api_workers or max(1, min(4, cores() // 4))
