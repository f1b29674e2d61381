"""Requests that front ends have sent and the engine has not got yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from engine.core.errors import InvalidRequestError
from engine.core.types import FINISH_ERROR, Output, Request
from engine.server.engine_process.output_routes import OutputRoutes
from engine.server.shared.messages import Add

if TYPE_CHECKING:
    from engine.core.engine import Engine

ADD_SECONDS = 0.005
"""Seconds per step in which requests are added to the engine: thousands of choices must not delay running requests."""


class PendingRequests:
    """Adds requests to the engine, a few milliseconds' worth per step, one of each message in turn."""

    def __init__(self, engine: Engine, routes: OutputRoutes) -> None:
        self._engine = engine
        self._routes = routes
        self._messages: deque[Iterator[Request]] = deque()

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, peer: bytes, message: Add) -> None:
        """Queue the requests of a message from the front end `peer`; from now on they can be aborted."""
        if self._routes.add(peer, message.first, [choice_id(*choice) for choice in _choices(message)]):
            self._messages.append(make_choice(*choice) for choice in _choices(message))

    def add_some(self) -> list[Output]:
        """Add requests to the engine until ADD_SECONDS have passed; returns an output for each that it refuses."""
        refused: list[Output] = []
        deadline = time.monotonic() + ADD_SECONDS
        while self._messages:
            requests = self._messages.popleft()
            request = next(requests, None)
            if request is None:
                continue
            self._messages.append(requests)
            if not self._routes.is_open(request.id):  # aborted meanwhile
                continue
            try:
                self._engine.add(request)
            except InvalidRequestError as error:
                refused.append(Output(request=request.id, finish_reason=FINISH_ERROR, error=str(error), refused=True))
            if time.monotonic() > deadline:
                break
        return refused


def _choices(message: Add) -> Iterator[tuple[Request, int]]:
    """(request, number of the choice) of each choice of the message's requests, in order."""
    return ((request, choice) for request in message.requests for choice in range(message.choices))


def choice_id(request: Request, choice: int) -> str:
    """The ID of a choice."""
    return f"{request.id}-{choice}"


def make_choice(request: Request, choice: int) -> Request:
    """The choice as a request of its own. Choices have different seeds; they share the prompt, and all else."""
    return attrs.evolve(request, id=choice_id(request, choice), params=request.params.of_choice(choice))
