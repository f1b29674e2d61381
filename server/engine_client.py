"""The front end's side of the engine process: starts it, sends requests, hands out outputs, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

import zmq
import zmq.asyncio
from attrs import define, frozen

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.types import EngineStats, Output, Request
from engine.core.wire import Decoder, encode
from engine.server.errors import ApiError
from engine.server.messages import Abort, Add, Failed, FromEngine, Launch, Outputs, Shutdown, Started, ToEngine
from engine.server.metrics import Metrics

COMMAND = (sys.executable, "-P", "-m", "engine.server.engine_process")
DEATH_GRACE = 0.05
"""Seconds for the last words of a dead process to be read from the socket."""

log = logging.getLogger(__name__)


@frozen
class Failure:
    """Why there is no engine any more."""

    reason: str
    since: float
    """time.time(), seconds."""

    def error(self) -> ApiError:
        """What a request gets."""
        return ApiError(503, f"the engine is gone: {self.reason}; the server needs a restart", code="engine_failed")


@define(eq=False)
class _Open:
    """A request that the engine works on."""

    group: Group
    arrival: float
    latest: float | None = None
    """When its latest tokens came."""


class Group:
    """Requests that were submitted together. Leaving its `with` block aborts those that have not finished."""

    def __init__(self, client: EngineClient, ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(ids)
        self._outputs: list[Output] = []
        self._error: ApiError | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for request in list(self._open):
            self.abort(request)

    async def next(self) -> list[Output]:
        """All outputs that came since the last call, oldest first; waits for one.

        Raises ApiError when the engine died or the server gave up waiting for it.
        """
        await self._wake.wait()
        self._wake.clear()
        if not self._outputs and self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            self._wake.set()
        return outputs

    def abort(self, request: str, reason: str = "abort") -> None:
        """Stop a request; its finish is counted under `reason`. No more outputs come for it."""
        if request in self._open:
            self._open.discard(request)
            self._outputs = [output for output in self._outputs if output.request != request]
            self._client.abort(request, reason)

    def put(self, output: Output) -> None:
        """Called by the client: an output has come."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Called by the client: no more outputs will come."""
        self._open.clear()
        self._error = error
        self._wake.set()


class EngineClient:
    """One engine process. Use from the event loop's thread only."""

    def __init__(self, config: EngineConfig, metrics: Metrics, command: Sequence[str] = COMMAND) -> None:
        self.metrics = metrics
        self.stats = EngineStats()
        self.failure: Failure | None = None
        self._config = config
        self._command = command
        self._open: dict[str, _Open] = {}
        self._ready = False
        self._last_words: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: str | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._exited = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Started:
        """Start the process and wait until it takes requests. Raises EngineError with its own words if it cannot."""
        self._directory = tempfile.mkdtemp(prefix="engine-")  # mode 0700: nobody else can connect
        address = f"ipc://{Path(self._directory) / 'engine'}"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        launch = encode(Launch(config=self._config, address=address))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(launch).to_bytes(4, "big") + launch)
            self._process.stdin.flush()  # and left open: its end tells the process that we are gone
        except BrokenPipeError:
            log.debug("the engine process died at once")
        self._watch(self._process)
        started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._receive(self._socket, started)),
            asyncio.create_task(self._bury(self._process, started)),
        ]
        return await started

    def submit(self, requests: Sequence[Request]) -> Group:
        """Send requests to the engine. Raises ApiError when it is gone, or has no room for them."""
        if self.failure is not None:
            raise self.failure.error()
        most = self._config.server.max_waiting
        if len(self._open) + len(requests) > most:
            raise ApiError(
                503,
                f"the server has {len(self._open)} requests under way and takes at most {most} "
                "(server.max_waiting); try again later",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        group = Group(self, (request.id for request in requests))
        for request in requests:
            self._open[request.id] = _Open(group, request.arrival)
        self._send(Add(tuple(requests)))
        return group

    def abort(self, request: str, reason: str) -> None:
        """Stop a request; use Group.abort."""
        if self._open.pop(request, None) is not None:
            self.metrics.finished[reason] += 1
            self._send(Abort((request,)))

    def fail(self, error: ApiError) -> None:
        """End all open requests with this error and abort them in the engine."""
        groups = {entry.group for entry in self._open.values()}
        self.metrics.finished["error"] += len(self._open)
        if self.failure is None and self._open:
            self._send(Abort(tuple(self._open)))
        self._open.clear()
        for group in groups:
            group.fail(error)

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the process, by force when it does not stop within the time (seconds), and remove the socket."""
        try:
            if self._ready and not self._exited.is_set():
                self._send(Shutdown())
                try:
                    await asyncio.wait_for(self._exited.wait(), timeout)
                except TimeoutError:
                    log.warning("the engine process did not stop within %s s and is killed", timeout)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.kill()

    def kill(self) -> None:
        """Leave nothing behind, at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # A PAIR socket without high-water mark takes the message at once, unless the peer is gone; then the process's
        # death is about to be noticed and ends all requests.
        lost = cast("asyncio.Future[object]", self._socket.send(encode(message), zmq.DONTWAIT)).exception()
        if lost is not None:
            log.debug("no engine process to send to: %s", lost)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Set `_exited` when the process ends, however it ends."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            process.wait()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._exited.set)

        threading.Thread(target=wait, name="engine process", daemon=True).start()

    async def _receive(self, socket: zmq.asyncio.Socket, started: asyncio.Future[Started]) -> None:
        while True:
            data = await socket.recv()
            try:
                message = self._decoder.decode(data)
            except EngineError as unreadable:
                message = Failed(str(unreadable))
                assert self._process is not None
                self._process.kill()
            match message:
                case Outputs(outputs, stats):
                    if stats is not None:
                        self.stats = stats
                    self._hand_out(outputs)
                case Started():
                    self._ready = True
                    if not started.done():
                        started.set_result(message)
                case Failed(error):
                    self._last_words = error

    def _hand_out(self, outputs: tuple[Output, ...]) -> None:
        now = time.monotonic()
        for output in outputs:
            entry = self._open.get(output.request)
            if entry is None:  # aborted meanwhile
                continue
            if output.tokens:
                self.metrics.tokens(now - (entry.latest or entry.arrival), len(output.tokens), entry.latest is None)
                entry.latest = now
            if output.finish_reason is not None:
                del self._open[output.request]
                self.metrics.finish(output.finish_reason, output.times, now - entry.arrival)
            entry.group.put(output)

    async def _bury(self, process: subprocess.Popen[bytes], started: asyncio.Future[Started]) -> None:
        """When the process ends: tell everyone who waits for it."""
        await self._exited.wait()
        await asyncio.sleep(DEATH_GRACE)
        reason = self._last_words or f"its process {_fate(process.returncode)}"
        self.failure = Failure(reason, time.time())
        self.stats = EngineStats()
        if not started.done():
            started.set_exception(
                EngineError(self._last_words or f"the engine could not start: its process {_fate(process.returncode)}")
            )
            return
        log.error("the engine is gone: %s", reason)
        self.fail(self.failure.error())


def _fate(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"exited with code {code}"
