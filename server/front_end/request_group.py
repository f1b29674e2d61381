"""Requests of one client that were submitted together: their events, as they arrive from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from engine.core.types import FINISH_ABORT, Output
from engine.server.front_end.errors import ApiError

OutputEvent = tuple[int, Sequence[int], Output | None]
"""(index of the request in its group, its new tokens, the Output; None: the Output has nothing but the tokens)."""


class RequestGroup:
    """Requests submitted together. Leaving the group's `with` block aborts the requests that have not finished."""

    def __init__(self, abort: Callable[[Iterable[int], str, int], None], numbers: Iterable[int]) -> None:
        """numbers: the numbers of the requests, in the order of their indices.

        abort: called with the numbers of requests, the finish reason to count, and the number of tokens generated.
        """
        self._abort = abort
        self._open = dict(enumerate(numbers))
        self._events: list[OutputEvent] = []
        self.prompt_logprobs: dict[int, tuple[bytes, ...]] = {}
        """By index, the slices (packed_logprobs.py) that belong to a request's first event."""
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __enter__(self) -> RequestGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener = None
        numbers, self._open, self._events = list(self._open.values()), {}, []
        self._abort(numbers, FINISH_ABORT, 0)

    async def next(self) -> list[OutputEvent]:
        """Wait for events and return all since the last call, oldest first. One caller at a time.

        Raises ApiError when the engine process has exited or the server has ended the requests.
        """
        if not self._events and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever there are events to take; cheaper than a waiting task."""
        self._listener = listener

    def take(self) -> list[OutputEvent]:
        """Return all events since the last call, without waiting. Raises as `next` does."""
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def abort(self, index: int, reason: str = FINISH_ABORT, num_tokens: int = 0) -> None:
        """Abort a request and drop its events. reason: the finish reason to count. num_tokens: tokens it generated."""
        number = self._open.pop(index, None)
        if number is not None:
            self._events = [event for event in self._events if event[0] != index]
            self._abort((number,), reason, num_tokens)

    def put(self, index: int, tokens: Sequence[int], output: Output | None) -> bool:
        """Add an event; return whether it is the first since the last `take`. Called by EngineClient."""
        first = not self._events
        self._events.append((index, tokens, output))
        if output is not None and output.finish_reason is not None:
            self._open.pop(index, None)
        return first

    def notify(self) -> None:
        """Wake the listener or the waiter. Called by EngineClient after all received events have been put."""
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End the requests with `error`. Called by EngineClient."""
        self._open.clear()
        self._error = error
        self.notify()
