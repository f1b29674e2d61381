"""Sends control calls to engine processes, and resolves them when answers come or a process exits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from engine.server.front_end.engine_link import EngineLink
from engine.server.front_end.errors import ApiError
from engine.server.shared.messages import Control, ControlAnswer


class ControlCalls:
    """The control calls of one front end that are not answered yet. Use from the event loop's thread only."""

    def __init__(self, links: Sequence[EngineLink]) -> None:
        """links: to the replicas, in order."""
        self._links = links
        self._numbers = count(1)
        self._waiting: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """By number, the replica and the future of its answer."""

    async def call(self, replica: int, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a control call in the engine process of one replica and return its answer, plain data.

        Raises ApiError: 400 if it is refused or fails, 409 if another one is in progress, 503 if the process is down or
        exits.
        """
        link = self._links[replica]
        if link.down is not None:
            raise _is_down(replica, link.down.reason)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = replica, future
        try:
            link.send(Control(number, name, dict(arguments)))
            return await future
        finally:
            del self._waiting[number]

    def resolve(self, answers: Iterable[ControlAnswer]) -> None:
        """Resolve the calls that these answer; an answer that no one waits for is dropped."""
        for answer in answers:
            _, future = self._waiting.get(answer.number, (0, None))
            if future is None or future.done():
                continue
            if answer.error:
                status, code = (409, "busy") if answer.busy else (400, "refused")
                future.set_exception(ApiError(status, answer.error, code=code))
            else:
                future.set_result(answer.value)

    def fail(self, replica: int, reason: str) -> None:
        """Fail the calls to a replica whose engine process has exited."""
        for called, future in self._waiting.values():
            if called == replica and not future.done():
                future.set_exception(_is_down(replica, reason))


def _is_down(replica: int, reason: str) -> ApiError:
    return ApiError(503, f"replica {replica} of the engine is down: {reason}", code="engine_failed")
