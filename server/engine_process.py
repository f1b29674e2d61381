"""The engine process: takes requests from the front end, steps the engine, sends outputs.

Standard input brings the launch message and then stays open: its end means that the front end is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from engine.core.config import EngineConfig
from engine.core.errors import EngineError, InvalidRequestError
from engine.core.types import FINISH_ERROR, EngineStats, Output, Request
from engine.core.wire import Decoder, encode
from engine.server.messages import Abort, Add, Failed, FromEngine, Launch, Outputs, Shutdown, Started, ToEngine

if TYPE_CHECKING:
    from engine.core.engine import Engine

STATS_INTERVAL = 0.25
"""Seconds between two reports of statistics while the engine works."""
CHECK_INTERVAL_MS = 1000
"""How often an idle engine looks whether its executor is alive."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return run(_make_engine)


def run(make_engine: Callable[[EngineConfig], Engine]) -> int:
    """The whole life of the process, around the engine that `make_engine` gives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    pipe = _own_stdin()
    size = int.from_bytes(_read(pipe, 4), "big")
    launch = Decoder[Launch](Launch).decode(_read(pipe, size))
    threading.Thread(target=_exit_with_parent, args=(pipe, launch.address), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(launch.address)
    try:
        return _run(make_engine, launch.config, Channel(socket))
    finally:
        socket.close(linger=1000)
        context.term()


def _run(make_engine: Callable[[EngineConfig], Engine], config: EngineConfig, channel: Channel) -> int:
    begun = time.monotonic()
    try:
        engine = make_engine(config)
    except Exception as error:
        if not isinstance(error, EngineError):
            log.exception("the engine could not start")
        channel.send(Failed(_sentence(error)))
        return 1
    try:
        gc.collect()
        gc.freeze()  # what start-up made lives on; later collections need not look at it
        channel.send(
            Started(
                cache=engine.cache_info,
                choices=engine.parts.choices,
                max_len=engine.max_len,
                vocab_size=engine.vocab_size,
                default_params=engine.default_params,
                seconds=time.monotonic() - begun,
            )
        )
        loop(engine, channel)
        return 0
    except Exception as error:
        log.exception("the engine stopped")
        channel.send(Failed(_sentence(error)))
        return 1
    finally:
        engine.close()


class Channel:
    """The engine's end of the connection to the front end."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(encode(message))

    def wait(self, milliseconds: int) -> None:
        """Sleep until there is a message, or the time is over."""
        self._socket.poll(milliseconds)

    def pending(self) -> Iterator[ToEngine]:
        """The messages that are here."""
        while True:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield self._decoder.decode(data)


def loop(engine: Engine, channel: Channel) -> None:
    """Serve until a Shutdown message. Raises what `Engine.step` raises."""
    sent = EngineStats()
    due = 0.0
    while True:
        if not engine.has_work:
            channel.wait(CHECK_INTERVAL_MS)
            health = engine.check()
            if not health.ok:
                raise EngineError(health.detail)
        outputs: list[Output] = []
        for message in channel.pending():
            match message:
                case Add(requests):
                    outputs += _add(engine, requests)
                case Abort(ids):
                    for request in ids:
                        engine.abort(request)
                case Shutdown():
                    return
        if engine.has_work:
            outputs += engine.step()
        now = time.monotonic()
        if now >= due or not engine.has_work:
            stats, due = engine.stats(), now + STATS_INTERVAL
            if outputs or stats != sent:
                channel.send(Outputs(tuple(outputs), stats))
                sent = stats
        elif outputs:
            channel.send(Outputs(tuple(outputs)))


def _add(engine: Engine, requests: tuple[Request, ...]) -> Iterator[Output]:
    """Queue the requests; yields an output for each one that is refused."""
    for request in requests:
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


def _own_stdin() -> int:
    """Standard input under another number, so that nothing else reads from it."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return pipe


def _read(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            sys.exit("error: the engine process is started by `engine serve`, not by hand")
        data += part
    return data


def _exit_with_parent(pipe: int, address: str) -> None:
    """Wait for the end of the pipe: the kernel closes it however the front end dies, also while a step runs."""
    while os.read(pipe, 4096):
        pass
    socket = Path(address.removeprefix("ipc://"))
    with suppress(OSError):  # the front end had no time to remove it, or has done so
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
