"""Concurrent asyncio streams over one engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define, field

from engine.core.errors import EngineError, InvalidRequestError
from engine.core.generation import abort_all, add_request, advance, make_request, request_error
from engine.core.text.detokenizer import Detokenizer, TextDelta
from engine.core.types import Output, Request, SamplingParams

if TYPE_CHECKING:
    from engine.core.engine import Engine


@define(eq=False)
class _Stream:
    """An open stream: its request, and what its consumer has not read yet."""

    request: Request
    unread: asyncio.Queue[TextDelta | BaseException] = field(factory=asyncio.Queue)
    """An exception is the last item."""


class AsyncGenerator:
    """Concurrent streams over one engine, in one event loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._engine_in_use = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._pump: _Pump | None = None

    def close(self) -> None:
        """Wait for the step in progress, if any, and end the thread.

        The engine is marked as closed by then, so the pump's next use of it raises, which ends the streams.
        """
        with self._engine_in_use:
            self._thread.shutdown(wait=False)

    async def stream(self, prompt: Sequence[int], params: SamplingParams | None) -> AsyncIterator[TextDelta]:
        """Implements Engine.astream."""
        await self._engine.acompile_grammar(params)  # else `add` would block the event loop
        pump = self._running_pump()
        stream = _Stream(make_request(self._engine, prompt, params))
        pump.new.append(stream)
        try:
            while True:
                delta = await stream.unread.get()
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            pump.closed.append(stream.request.id)

    def end_abandoned(self) -> None:
        """End the streams of an event loop that has ended."""
        if self._pump is not None and not self._pump.loop.is_running():
            self._pump.end()

    def _running_pump(self) -> _Pump:
        """The pump of this event loop. Raises InvalidRequestError if another loop has streams."""
        loop = asyncio.get_running_loop()
        if self._pump is not None and self._pump.loop is not loop and not self._pump.ended:
            if self._pump.loop.is_running():
                raise InvalidRequestError(
                    "another event loop has open streams of this engine; use one loop for all streams"
                )
            self._pump.end()
        if self._pump is None or self._pump.ended:
            self._pump = _Pump(self._engine, self._engine_in_use, self._thread, loop)
        return self._pump


class _Pump:
    """Runs steps while an event loop has open streams, in a separate thread, since all shared threads of the loop may
    be busy.

    Streams only leave notes: `new` and `closed`. A task of the loop reads the notes between steps, when no thread uses
    the engine.
    """

    def __init__(
        self,
        engine: Engine,
        engine_in_use: threading.Lock,
        thread: ThreadPoolExecutor,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """engine_in_use: held while a step runs. thread: runs the steps, and goes on if the event loop ends
        meanwhile."""
        self.loop = loop
        self.ended = False
        self.new: list[_Stream] = []
        """Streams whose requests the engine does not have yet."""
        self.closed: list[str] = []
        """Requests whose streams were closed."""
        self._engine = engine
        self._engine_in_use = engine_in_use
        self._streams: dict[str, _Stream] = {}
        self._running: dict[str, Detokenizer] = {}
        self._thread = thread
        self._task = loop.create_task(self._run())

    def end(self, error: BaseException | None = None) -> None:
        """Abort all requests and, with an error, raise it in their streams. Then the engine is idle, or has failed."""
        with self._engine_in_use:
            if self.ended:
                return
            self.ended = True
            self._abort(list(self._streams)) if error is None else self._fail(error)
            with suppress(EngineError):  # the engine's own error, which its next use raises
                abort_all(self._engine, ())

    async def _run(self) -> None:
        """Run steps until the engine has no work. Any error ends all streams."""
        try:
            while self._read_notes():
                for name, output, delta in await self.loop.run_in_executor(self._thread, self._step):
                    error = request_error(output)
                    self._streams[name].unread.put_nowait(delta if error is None else error)
                    if delta.finish_reason is not None:
                        del self._streams[name]
        except GeneratorExit:  # the event loop has ended; the garbage collector closes this, perhaps during a step
            raise
        except BaseException as error:
            self.end(error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> list[tuple[str, Output, TextDelta]]:
        with self._engine_in_use:
            return [] if self.ended else list(advance(self._engine, self._running))

    def _read_notes(self) -> bool:
        """Add the requests of new streams to the engine and abort those of closed ones.

        Returns False if no work is left, which ends the pump. Raises ExecutorError as Engine.step does.
        """
        with self._engine_in_use:
            self._engine.require_usable()
            for stream in self.new:
                try:
                    self._running[stream.request.id] = add_request(self._engine, stream.request)
                except EngineError as error:
                    stream.unread.put_nowait(error)
                else:
                    self._streams[stream.request.id] = stream
            self.new.clear()
            self._abort(self.closed)
            self.closed.clear()
            self.ended = not self._engine.has_work
            return not self.ended

    def _fail(self, error: BaseException) -> None:
        for stream in (*self._streams.values(), *self.new):
            stream.unread.put_nowait(error)
        self._abort(list(self._streams))

    def _abort(self, names: Sequence[str]) -> None:
        """Forget these streams, and abort those of their requests that have not finished."""
        for name in names:
            if self._streams.pop(name, None) is not None:
                self._running.pop(name, None)
                self._engine.abort(name)
