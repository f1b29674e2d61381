"""Requests submitted together, and the outputs that have come for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from engine.core.types import Output
from engine.server.front_end.errors import ApiError

News = tuple[int, Sequence[int], Output | None]
"""(index of the request in its group, its new tokens, the whole output where it holds more than tokens)."""


class Group:
    """Requests that were submitted together. Leaving its `with` block aborts those that have not finished."""

    def __init__(self, abort: Callable[[int, str], None], numbers: Iterable[int]) -> None:
        """numbers: of the requests, in order; abort: called with a number and the reason to count the abort under."""
        self._abort = abort
        self._open = dict(enumerate(numbers))
        self._news: list[News] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener = None
        for index in list(self._open):
            self.abort(index)

    async def next(self) -> list[News]:
        """All that came since the last call, oldest first; waits for something. For one caller at a time.

        Raises ApiError when the engine died or the server gave up waiting for it.
        """
        if not self._news and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever there is something to take; cheaper than a waiting task."""
        self._listener = listener

    def take(self) -> list[News]:
        """As `next`, without waiting."""
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news

    def abort(self, index: int, reason: str = "abort") -> None:
        """Stop a request; its finish is counted under `reason`. No more comes of it."""
        number = self._open.pop(index, None)
        if number is not None:
            self._news = [piece for piece in self._news if piece[0] != index]
            self._abort(number, reason)

    def put(self, index: int, tokens: Sequence[int], output: Output | None) -> bool:
        """Called by the client: something has come. Whether it is the first thing since the last `take`."""
        first = not self._news
        self._news.append((index, tokens, output))
        if output is not None and output.finish_reason is not None:
            self._open.pop(index, None)
        return first

    def wake(self) -> None:
        """Called by the client when all is put that has come by now."""
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Called by the client: no more will come."""
        self._open.clear()
        self._error = error
        self.wake()
