"""server.request_timeout: ends requests that take too long, whatever they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from attrs import frozen
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.front_end.errors import ApiError
from engine.server.http.errors import error_response
from engine.server.http.generation import Generation

DEADLINE = "deadline"
"""Name of a request's Deadline in the scope's state."""


@frozen(eq=False)
class Deadline:
    """When a request must have been answered."""

    seconds: float
    """server.request_timeout."""
    timeout: asyncio.Timeout
    """Interrupts the request."""

    @contextmanager
    def enforce(self, generation: Generation) -> Iterator[None]:
        """End `generation` with the error, rather than interrupt the request, when the time is up in the block."""
        when = self.timeout.when()
        assert when is not None
        self.timeout.reschedule(None)
        timer = asyncio.get_running_loop().call_at(when, lambda: generation.fail(self.error()))
        try:
            yield
        finally:
            timer.cancel()

    def error(self) -> ApiError:
        """The error that the client gets."""
        message = f"the request took longer than {self.seconds:g} s (server.request_timeout); ask for fewer tokens"
        return ApiError(504, message, code="request_timeout")


def enforce_deadline(scope: Scope, generation: Generation) -> AbstractContextManager[None]:
    """End `generation` with an error when the request's time is up in the block."""
    deadline: Deadline | None = scope["state"].get(DEADLINE)
    return nullcontext() if deadline is None else deadline.enforce(generation)


class RequestTimeout:
    """Middleware that answers 504 to a POST request whose body or prompt takes too long.

    From the start of the generation on, the response enforces the rest of the time itself (`enforce_deadline`), because
    the error may have to be the last event of a stream.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        timeout = asyncio.timeout(self._seconds)
        deadline = scope["state"][DEADLINE] = Deadline(self._seconds, timeout)
        try:
            async with timeout:
                await self._app(scope, receive, send_and_note)
        except TimeoutError:
            if started or not timeout.expired():
                raise
            response = error_response(deadline.error(), scope)
            response.headers["connection"] = "close"  # the rest of the body may still come
            await response(scope, receive, send)
