"""Entry point and loop of an engine process: receives requests, steps the engine, sends outputs.

Run as `python -m engine.server.engine_process` by the supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import zmq

from engine.core.collector import finish_start, paused
from engine.core.config import EngineConfig, ServerConfig
from engine.core.errors import ConfigError, EngineError, PluginError, PluginFaultError
from engine.core.executors import MessageDecoder, encode
from engine.core.gc_pauses import GcPauses
from engine.core.logs import configure, engine_process
from engine.core.types import EngineStats, Output
from engine.server.engine_process.control_calls import answer
from engine.server.engine_process.output_routes import OutputRoutes
from engine.server.engine_process.pending_requests import PendingRequests
from engine.server.engine_process.prober import Prober
from engine.server.engine_process.trace_calls import TraceCalls
from engine.server.shared.exit_limit import EXIT_SECONDS, limit_exit
from engine.server.shared.heartbeat import Heartbeat
from engine.server.shared.messages import (
    SOCKET,
    Abort,
    Add,
    Control,
    EngineLaunch,
    Failed,
    FrontEndExited,
    FrontEndToEngine,
    Hello,
    Outputs,
    Probe,
    Shutdown,
    Started,
    SupervisorToEngine,
)
from engine.server.shared.supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.executors import Health

STATS_INTERVAL = 0.25
"""Minimum seconds between two reports of statistics while the engine is busy."""
IDLE_CHECK_MS = 1000
"""Interval at which an idle engine checks its executor, milliseconds."""
TRACE_CHECK_MS = 20
"""Interval at which an idle engine checks whether a trace is written that a client waits for, milliseconds."""
COMPILE_CHECK_MS = 1
"""Interval at which an engine that has nothing else to do checks whether a grammar is compiled, milliseconds."""
CLOSE_SECONDS = 15.0
"""Time in which a started engine must close and the process exit: its executor may take seconds to free its devices.
When the server stops, the supervisor waits for less."""
MAX_MESSAGES = 32
"""Maximum number of front end messages read between two steps: a burst of requests must not delay running ones."""
RECEIVE_SECONDS = 0.005
"""Seconds after which no further messages are read before the next step, for the same reason."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run until the supervisor says Shutdown; the exit code."""
    return run(_make_engine)


def run(make_engine: Callable[[EngineConfig], Engine]) -> int:
    """Run the process with the engine that `make_engine` returns; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles it
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process group may write to the terminal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor: SupervisorLink[SupervisorToEngine] = SupervisorLink(SupervisorToEngine)
    launch: EngineLaunch = supervisor.launch(EngineLaunch)
    server = launch.config.server
    configure(engine_process(launch.replica, server.replicas), style=server.log_format, level=server.log_level)
    context = zmq.Context()
    channel = Channel(context, Path(launch.directory) / SOCKET.format(launch.replica, launch.incarnation))
    supervisor.listen(channel.put, launch.directory)
    try:
        return _run(make_engine, launch, channel, supervisor)
    finally:
        channel.close()
        context.term()


def _run(
    make_engine: Callable[[EngineConfig], Engine],
    launch: EngineLaunch,
    channel: Channel,
    supervisor: SupervisorLink[SupervisorToEngine],
) -> int:
    load_start = time.monotonic()
    heartbeat = Heartbeat.map(launch.directory, launch.replica, create=True)
    engine: Engine | None = None
    code = 0  # also of SIGTERM, which raises SystemExit
    try:
        try:
            engine = make_engine(launch.config)
        except Exception as error:
            unexpected = isinstance(error, PluginFaultError) or not isinstance(error, EngineError)
            if unexpected:
                log.exception("the engine could not start")
            permanent = isinstance(error, ConfigError | PluginError) and not unexpected
            supervisor.send(Failed(_sentence(error), permanent=permanent))
            code = 1
            return code
        heartbeat.record_loop(None)
        finish_start(freeze=launch.config.server.gc_freeze)
        gc_pauses = GcPauses()
        gc_pauses.listen()
        supervisor.send(
            Started(
                replica=launch.replica,
                incarnation=launch.incarnation,
                cache=engine.cache_info,
                choices=engine.parts.choices,
                max_len=engine.max_len,
                vocab_size=engine.vocab_size,
                default_params=engine.default_params,
                seconds=time.monotonic() - load_start,
                pid=os.getpid(),
            )
        )
        loop(engine, channel, heartbeat, launch.config.server, launch.replica, gc_pauses)
        return code
    except Exception as error:
        log.exception("the engine stopped")
        supervisor.send(Failed(_sentence(error)))
        code = 1
        return code
    finally:
        limit_exit(code, EXIT_SECONDS if engine is None else CLOSE_SECONDS)
        if engine is not None:
            engine.close()


class Channel:
    """Sends outputs to front ends; receives messages from front ends and the supervisor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        """path: of the ZeroMQ socket."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # sending never waits for a front end
        self._socket.bind(f"ipc://{path}")
        self._decoder: MessageDecoder[FrontEndToEngine] = MessageDecoder(FrontEndToEngine)
        # Wakes `wait` from the supervisor link's thread: a ZeroMQ socket belongs to one thread.
        self._wake_sender, self._wake_receiver = (context.socket(zmq.PAIR) for _ in range(2))
        self._wake_receiver.bind("inproc://supervisor")
        self._wake_sender.connect("inproc://supervisor")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._from_supervisor: deque[SupervisorToEngine] = deque()

    def put(self, message: SupervisorToEngine) -> None:
        """Queue a message of the supervisor; called from the supervisor link's thread. A no-op once closed."""
        self._from_supervisor.append(message)
        with suppress(zmq.ZMQError):  # it is closed: this process is about to exit
            self._wake_sender.send(b"")

    def send(self, peer: bytes, message: Outputs) -> None:
        """Queue a message to a front end; a no-op if it has exited. Never blocks."""
        self._socket.send(peer, zmq.SNDMORE)
        self._socket.send(encode(message))

    def wait(self, milliseconds: int) -> None:
        """Wait until a message has come, at most `milliseconds`."""
        if self._wake_receiver in dict(self._poller.poll(milliseconds)):
            self._wake_receiver.recv()

    def receive(self) -> Iterator[tuple[bytes, FrontEndToEngine | SupervisorToEngine]]:
        """Yield (sender, message) for each waiting message, a few milliseconds' worth of them at a time.

        The sender is a ZeroMQ identity, b"" for the supervisor.
        """
        while self._from_supervisor:
            yield b"", self._from_supervisor.popleft()
        deadline = time.monotonic() + RECEIVE_SECONDS
        for number in range(MAX_MESSAGES):
            if number and time.monotonic() > deadline:
                return
            try:
                peer = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield peer, self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close the sockets; messages already queued have one second to leave."""
        self._socket.close(linger=1000)
        self._wake_sender.close(linger=0)
        self._wake_receiver.close(linger=0)


def loop(
    engine: Engine,
    channel: Channel,
    heartbeat: Heartbeat,
    config: ServerConfig,
    replica: int,
    gc_pauses: GcPauses | None = None,
) -> None:
    """Step the engine until Shutdown. Raises what `Engine.step` raises.

    gc_pauses: what the statistics report as this process's collections.
    """
    routes = OutputRoutes()
    prober = Prober(engine, heartbeat, config.health_interval)
    traces = TraceCalls(engine, config, replica, routes, channel.send)
    pending = PendingRequests(engine, routes)
    receiving = sending = 0.0
    sent_stats = EngineStats()
    next_stats = 0.0
    while True:
        idle: Health | None = None
        if not (engine.has_work or pending or routes.behind):
            channel.wait(TRACE_CHECK_MS if traces.waiting else IDLE_CHECK_MS)
            idle = engine.check()
            if not idle.ok:
                raise EngineError(idle.detail)
        elif pending.only_compiling and not (engine.has_work or routes.behind):
            channel.wait(COMPILE_CHECK_MS)
        heartbeat.record_loop(idle)
        outputs: list[Output] = []
        begin = time.perf_counter()
        for peer, message in channel.receive():
            match message:
                case Hello():
                    routes.add_front_end(peer)
                    sent_stats = EngineStats()  # so that the new front end soon receives statistics
                case Add():
                    pending.put(peer, message)
                case Abort(numbers):
                    for request in routes.remove(peer, numbers):
                        engine.abort(request)
                case Probe():
                    prober.request_step()
                case Control():
                    if (answered := answer(engine, traces, peer, message)) is not None:
                        channel.send(peer, Outputs([], [], [], [], control=[answered]))
                case FrontEndExited(name):
                    for request in routes.remove_front_end(name.encode()):
                        engine.abort(request)
                case Shutdown():
                    return
        if traces.started:
            traces.poll()
        outputs += pending.add_some()
        if engine.has_work:  # statistics of an idle engine do not change
            receiving += time.perf_counter() - begin
        prober.before_step()
        if engine.has_work:
            outputs += engine.step()
        prober.after_step()
        stats = None
        now = time.monotonic()
        if now >= next_stats or not engine.has_work:
            next_stats = now + STATS_INTERVAL
            stats = _with_own(engine.stats(), receiving, sending, gc_pauses)
            if pending.num_compiling:
                stats = attrs.evolve(stats, compiling=pending.num_compiling)
            if stats == sent_stats and not outputs and not routes.behind:
                continue
            sent_stats = stats
        begin = time.perf_counter()
        for peer, grouped in routes.group(outputs, stats):
            channel.send(peer, grouped)
        if outputs:
            sending += time.perf_counter() - begin


def _with_own(stats: EngineStats, receiving: float, sending: float, gc_pauses: GcPauses | None) -> EngineStats:
    """The engine's statistics with this process's own: seconds of its messages, and its garbage collections."""
    own = () if gc_pauses is None else (("engine", gc_pauses.counts()),)
    seconds = (*stats.seconds, ("receive", receiving), ("send", sending))
    return attrs.evolve(stats, seconds=seconds, gc_pauses=(*own, *stats.gc_pauses))


def _make_engine(config: EngineConfig) -> Engine:
    with paused():
        from engine.core.engine import Engine
        from engine.core.startup_display import show_startup

    with show_startup(logged=config.server.log_format == "json") as listener:
        return Engine(config=config, on_progress=listener)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
