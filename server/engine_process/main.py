"""The engine process: takes requests from the front ends, steps the engine, sends outputs."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, EngineError, InvalidRequestError, PluginError, PluginFaultError
from engine.core.executors import MessageDecoder, encode
from engine.core.types import FINISH_ERROR, EngineStats, Output
from engine.server.engine_process.output_routes import Routes
from engine.server.engine_process.prober import Prober
from engine.server.shared.control import Control
from engine.server.shared.heartbeat import Heartbeat
from engine.server.shared.messages import (
    SOCKET,
    Abort,
    Add,
    EngineLaunch,
    Failed,
    FromClient,
    Gone,
    Hello,
    Outputs,
    Probe,
    Shutdown,
    Started,
    ToEngine,
)

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.executors import Health

STATS_INTERVAL = 0.25
"""Seconds between two reports of statistics while the engine works."""
CHECK_INTERVAL_MS = 1000
"""How often an idle engine looks whether its executor is alive."""
MOST_MESSAGES = 32
"""Messages read between two steps: a burst of new requests must not hold up those that run."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return run(_make_engine)


def run(make_engine: Callable[[EngineConfig], Engine]) -> int:
    """The whole life of the process, around the engine that `make_engine` gives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # this group is never a terminal's own, but may write to it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control: Control[ToEngine] = Control(ToEngine)
    launch: EngineLaunch = control.launch(EngineLaunch)
    name = "engine" if launch.config.server.replicas == 1 else f"engine {launch.replica}"
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    context = zmq.Context()
    channel = Channel(context, Path(launch.directory) / SOCKET.format(launch.replica, launch.life))
    control.listen(channel.told, launch.directory)
    try:
        return _run(make_engine, launch, channel, control)
    finally:
        channel.close()
        context.term()


def _run(
    make_engine: Callable[[EngineConfig], Engine], launch: EngineLaunch, channel: Channel, control: Control[ToEngine]
) -> int:
    begun = time.monotonic()
    pulse = Heartbeat.map(launch.directory, launch.replica, create=True)
    try:
        engine = make_engine(launch.config)
    except Exception as error:
        unexpected = isinstance(error, PluginFaultError) or not isinstance(error, EngineError)
        if unexpected:
            log.exception("the engine could not start")
        for_good = isinstance(error, ConfigError | PluginError) and not unexpected
        control.send(Failed(_sentence(error), for_good=for_good))
        return 1
    try:
        pulse.beat(None)
        gc.collect()
        gc.freeze()  # what start-up made lives on; later collections need not look at it
        control.send(
            Started(
                replica=launch.replica,
                life=launch.life,
                cache=engine.cache_info,
                choices=engine.parts.choices,
                max_len=engine.max_len,
                vocab_size=engine.vocab_size,
                default_params=engine.default_params,
                seconds=time.monotonic() - begun,
            )
        )
        loop(engine, channel, pulse, launch.config.server.health_interval)
        return 0
    except Exception as error:
        log.exception("the engine stopped")
        control.send(Failed(_sentence(error)))
        return 1
    finally:
        engine.close()


class Channel:
    """The engine's end of the connections: to the front ends, and what the supervisor says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # sending never waits for a front end
        self._socket.bind(f"ipc://{path}")
        self._decoder: MessageDecoder[FromClient] = MessageDecoder(FromClient)
        # Wakes an idle engine from another thread: sockets of ZeroMQ belong to one thread each.
        self._waker, self._wakened = (context.socket(zmq.PAIR) for _ in range(2))
        self._wakened.bind("inproc://told")
        self._waker.connect("inproc://told")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)
        self._told: deque[ToEngine] = deque()

    def told(self, message: ToEngine) -> None:
        """The supervisor says something; called in a thread of its own."""
        self._told.append(message)
        self._waker.send(b"")

    def send(self, peer: bytes, message: Outputs) -> None:
        """Queue a message for a front end, in vain when it is gone; never blocks."""
        self._socket.send(peer, zmq.SNDMORE)
        self._socket.send(encode(message))

    def wait(self, milliseconds: int) -> None:
        """Sleep until there is a message, or the time is over."""
        if self._wakened in dict(self._poller.poll(milliseconds)):
            self._wakened.recv()

    def pending(self) -> Iterator[tuple[bytes, FromClient | ToEngine]]:
        """(who says it, what): the messages that are here, but no more than can be dealt with between two steps."""
        while self._told:
            yield b"", self._told.popleft()
        for _ in range(MOST_MESSAGES):
            try:
                peer = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield peer, self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Give what was sent a second to leave."""
        self._socket.close(linger=1000)
        self._waker.close(linger=0)
        self._wakened.close(linger=0)


def loop(engine: Engine, channel: Channel, pulse: Heartbeat, probe_interval: float) -> None:
    """Serve until a Shutdown message. Raises what `Engine.step` raises."""
    routes = Routes()
    prober = Prober(engine, pulse, probe_interval)
    sent = EngineStats()
    due = 0.0
    while True:
        idle: Health | None = None
        if not engine.has_work:
            channel.wait(CHECK_INTERVAL_MS)
            idle = engine.check()
            if not idle.ok:
                raise EngineError(idle.detail)
        pulse.beat(idle)
        outputs: list[Output] = []
        for peer, message in channel.pending():
            match message:
                case Hello():
                    routes.open(peer)
                    sent = EngineStats()  # so that it hears of them soon
                case Add():
                    outputs += _add(engine, routes, peer, message)
                case Abort(numbers):
                    for request in routes.remove(peer, numbers):
                        engine.abort(request)
                case Probe():
                    prober.ask()
                case Gone(name):
                    for request in routes.close(name.encode()):
                        engine.abort(request)
                case Shutdown():
                    return
        prober.before_step()
        if engine.has_work:
            outputs += engine.step()
        prober.after_step()
        stats = None
        now = time.monotonic()
        if now >= due or not engine.has_work:
            due = now + STATS_INTERVAL
            stats = engine.stats()
            if stats == sent and not outputs:
                continue
            sent = stats
        for peer, news in routes.sort(outputs, stats):
            channel.send(peer, news)


def _add(engine: Engine, routes: Routes, peer: bytes, message: Add) -> Iterator[Output]:
    """Queue the requests; yields an output for each one that is refused."""
    for number, request in enumerate(message.requests, message.first):
        if routes.add(peer, number, request.id):
            try:
                engine.add(request)
            except InvalidRequestError as error:
                yield Output(request=request.id, finish_reason=FINISH_ERROR, error=str(error))


def _make_engine(config: EngineConfig) -> Engine:
    from engine.core.engine import Engine
    from engine.core.startup_display import show_startup

    with show_startup() as listener:
        return Engine(config=config, on_progress=listener)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
