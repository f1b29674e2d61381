"""Maps each request to the front end that sent it, and groups a step's outputs by front end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from attrs import define, field

from engine.core.types import EngineStats, Output
from engine.server.shared.messages import Outputs
from engine.server.shared.packed_logprobs import PackedLogprobs, pack

PACK_SECONDS = 0.005
"""Seconds per step in which the log probabilities of prompts are encoded: long prompts must not delay other outputs."""


@define(eq=False)
class _FrontEnd:
    """A front end's open requests, and the columns of the next message to it."""

    requests: dict[int, str] = field(factory=dict)
    """Request ID by the front end's number for the request."""
    numbers: list[int] = field(factory=list)
    counts: list[int] = field(factory=list)
    tokens: list[int] = field(factory=list)
    full: list[tuple[int, Output]] = field(factory=list)
    prompt_logprobs: list[PackedLogprobs] = field(factory=list)

    def pop_message(self, stats: EngineStats | None) -> Outputs | None:
        """Build the next message and clear the columns; None if there is nothing to send."""
        if not (self.numbers or self.full or stats):
            return None
        message = Outputs(self.numbers, self.counts, self.tokens, self.full, stats, self.prompt_logprobs)
        self.numbers, self.counts, self.tokens, self.full, self.prompt_logprobs = [], [], [], [], []
        return message


@define(eq=False)
class _Held:
    """The first outputs of a request, which wait until the log probabilities of the prompt are encoded."""

    unpacked: Iterator[bytes]
    packed: list[bytes] = field(factory=list)
    outputs: list[Output] = field(factory=list)


@define(eq=False)
class _Route:
    """Destination of a request's outputs."""

    front_end: _FrontEnd
    number: int
    in_columns: bool | None = None
    """Whether outputs with nothing but tokens go into the columns: not if tokens of a prediction are counted. None
    before the first output, which never goes into the columns."""
    held: _Held | None = None


class OutputRoutes:
    """The front ends and their open requests."""

    def __init__(self) -> None:
        self._front_ends: dict[bytes, _FrontEnd] = {}
        self._exited: set[bytes] = set()
        self._routes: dict[str, _Route] = {}
        self._holding: deque[str] = deque()
        """Requests with held outputs."""

    def add_front_end(self, peer: bytes) -> None:
        """Add a front end that has connected. peer: its ZeroMQ identity."""
        if peer not in self._exited:  # messages of a front end may be read after its exit was reported
            self._front_ends.setdefault(peer, _FrontEnd())

    def front_ends(self) -> list[bytes]:
        """ZeroMQ identities of the front ends."""
        return list(self._front_ends)

    def remove_front_end(self, peer: bytes) -> list[str]:
        """Remove a front end that has exited; returns the IDs of its open requests."""
        self._exited.add(peer)
        front_end = self._front_ends.pop(peer, None)
        requests = [] if front_end is None else list(front_end.requests.values())
        for request in requests:
            del self._routes[request]
        return requests

    def add(self, peer: bytes, first: int, requests: Iterable[str]) -> bool:
        """Add request IDs, which the front end numbers from `first` on; False if the front end has exited."""
        front_end = self._front_ends.get(peer)
        if front_end is None:
            return False
        for number, request in enumerate(requests, first):
            front_end.requests[number] = request
            self._routes[request] = _Route(front_end, number)
        return True

    def is_open(self, request: str) -> bool:
        """Whether the request has neither finished nor been aborted."""
        return request in self._routes

    def remove(self, peer: bytes, numbers: Iterable[int]) -> Iterator[str]:
        """Remove requests that a front end aborts; yields the IDs of those that were open."""
        front_end = self._front_ends.get(peer)
        if front_end is not None:
            for number in numbers:
                request = front_end.requests.pop(number, None)
                if request is not None:
                    del self._routes[request]
                    yield request

    @property
    def behind(self) -> bool:
        """Whether outputs are held, so that `group` must be called even without new ones."""
        return bool(self._holding)

    def group(self, outputs: Sequence[Output], stats: EngineStats | None) -> Iterator[tuple[bytes, Outputs]]:
        """Group outputs by front end; yields one message per front end with outputs, or per front end if `stats`."""
        routes = self._routes
        for output in outputs:
            route = routes.get(output.request)
            if route is None:  # aborted while its step ran
                continue
            front_end = route.front_end
            if route.held is not None:
                route.held.outputs.append(output)
                continue
            if route.in_columns and output.finish_reason is None and not output.logprobs:
                tokens = output.tokens
                front_end.numbers.append(route.number)
                front_end.counts.append(len(tokens))
                front_end.tokens += tokens
                continue
            if output.prompt_logprobs is not None:
                route.held = _Held(pack(output.prompt_logprobs))
                route.held.outputs.append(msgspec.structs.replace(output, prompt_logprobs=None))
                self._holding.append(output.request)
                continue
            self._put(route, output)
        if self._holding:
            self._pack_some()
        for peer, front_end in self._front_ends.items():
            message = front_end.pop_message(stats)
            if message is not None:
                yield peer, message

    def _put(self, route: _Route, output: Output) -> None:
        """Add a whole output to the front end's next message."""
        route.front_end.full.append((route.number, output))
        if route.in_columns is None:
            route.in_columns = output.prediction_tokens is None
        if output.finish_reason is not None:
            del self._routes[output.request], route.front_end.requests[route.number]

    def _pack_some(self) -> None:
        """Encode held log probabilities until PACK_SECONDS have passed, and release the outputs of finished ones."""
        deadline = time.monotonic() + PACK_SECONDS
        while self._holding:
            route = self._routes.get(self._holding[0])
            if route is None or route.held is None:  # aborted meanwhile
                self._holding.popleft()
                continue
            held = route.held
            for data in held.unpacked:
                held.packed.append(data)
                if time.monotonic() > deadline:
                    return
            route.held = None
            self._holding.popleft()
            route.front_end.prompt_logprobs.append(PackedLogprobs(route.number, tuple(held.packed)))
            for output in held.outputs:
                self._put(route, output)
