"""Requests that front ends have sent and that are not added to the engine yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import attrs

from engine.core.errors import CheckpointError, EngineError, InvalidRequestError, PluginError
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
        self._compiling: deque[tuple[Request, Iterator[Request]]] = deque()
        """Requests whose grammars are being compiled, with those that follow in their messages."""

    def __bool__(self) -> bool:
        return bool(self._messages or self._compiling)

    @property
    def only_compiling(self) -> bool:
        """Whether all that is left waits for grammars to be compiled."""
        return bool(self._compiling) and not self._messages

    @property
    def num_compiling(self) -> int:
        """Number of requests that wait until their grammars are compiled."""
        return len(self._compiling)

    def put(self, peer: bytes, message: Add) -> None:
        """Queue the requests of a message from the front end `peer`; from now on they can be aborted."""
        if self._routes.add(peer, message.first, [choice_id(*choice) for choice in _choices(message)]):
            self._messages.append(make_choice(*choice) for choice in _choices(message))

    def add_some(self) -> list[Output]:
        """Add requests to the engine until ADD_SECONDS have passed; returns an output for each that it refuses."""
        refused: list[Output] = []
        deadline = time.monotonic() + ADD_SECONDS
        for _ in range(len(self._compiling)):
            first, others = self._compiling.popleft()
            if self._routes.is_open(first.id) and not self._engine.can_add(first):
                self._compiling.append((first, others))
            else:
                self._messages.appendleft(chain([first], others))
        while self._messages:
            requests = self._messages.popleft()
            request = next(requests, None)
            if request is None:
                continue
            if not self._routes.is_open(request.id):  # aborted meanwhile
                self._messages.append(requests)
                continue
            if request.params.grammar is not None and not self._engine.can_add(request):
                self._compiling.append((request, requests))
                continue
            self._messages.append(requests)
            try:
                self._engine.add(request)
            except (InvalidRequestError, PluginError, CheckpointError) as error:  # the last two: of compiling a grammar
                refused.append(_refusal(request, error))
            if time.monotonic() > deadline:
                break
        return refused


def _refusal(request: Request, error: EngineError) -> Output:
    """The output of a request that the engine does not take."""
    refused = isinstance(error, InvalidRequestError)
    return Output(
        request=request.id,
        finish_reason=FINISH_ERROR,
        error=str(error),
        refused=refused,
        parameter=error.parameter if isinstance(error, InvalidRequestError) else None,
    )


def _choices(message: Add) -> Iterator[tuple[Request, int]]:
    """(request, number of the choice) of each choice of the message's requests, in order."""
    return ((request, choice) for request in message.requests for choice in range(message.choices))


def choice_id(request: Request, choice: int) -> str:
    """The ID of a choice."""
    return f"{request.id}-{choice}"


def make_choice(request: Request, choice: int) -> Request:
    """The choice as a request of its own. Choices have different seeds; they share the prompt, and all else."""
    return attrs.evolve(request, id=choice_id(request, choice), params=request.params.of_choice(choice))
