"""Which front end asked for which request, and a step's outputs sorted by front end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field

from engine.core.types import EngineStats, Output
from engine.server.shared.messages import Outputs


@define(eq=False)
class _FrontEnd:
    """A front end, and what the next message to it will hold."""

    requests: dict[int, str] = field(factory=dict)
    """Those it has open, by its numbers for them."""
    numbers: list[int] = field(factory=list)
    counts: list[int] = field(factory=list)
    tokens: list[int] = field(factory=list)
    full: list[tuple[int, Output]] = field(factory=list)

    def take(self, stats: EngineStats | None) -> Outputs | None:
        """The message, if there is anything to say."""
        if not (self.numbers or self.full or stats):
            return None
        message = Outputs(self.numbers, self.counts, self.tokens, self.full, stats)
        self.numbers, self.counts, self.tokens, self.full = [], [], [], []
        return message


@define(eq=False)
class _Route:
    """Where the outputs of a request go."""

    front: _FrontEnd
    number: int
    begun: bool = False


class Routes:
    """The front ends and their open requests."""

    def __init__(self) -> None:
        self._fronts: dict[bytes, _FrontEnd] = {}
        self._gone: set[bytes] = set()
        self._routes: dict[str, _Route] = {}

    def open(self, peer: bytes) -> None:
        """A front end has come."""
        if peer not in self._gone:  # what it said may be read after it was buried
            self._fronts.setdefault(peer, _FrontEnd())

    def close(self, peer: bytes) -> list[str]:
        """A front end is dead; the requests it has left."""
        self._gone.add(peer)
        front = self._fronts.pop(peer, None)
        left = [] if front is None else list(front.requests.values())
        for request in left:
            del self._routes[request]
        return left

    def add(self, peer: bytes, number: int, request: str) -> bool:
        """A front end sends a request, which has this number there; False: the front end is gone."""
        front = self._fronts.get(peer)
        if front is None:
            return False
        front.requests[number] = request
        self._routes[request] = _Route(front, number)
        return True

    def remove(self, peer: bytes, numbers: Iterable[int]) -> Iterator[str]:
        """A front end wants no more of these; yields those that had not ended."""
        front = self._fronts.get(peer)
        if front is not None:
            for number in numbers:
                request = front.requests.pop(number, None)
                if request is not None:
                    del self._routes[request]
                    yield request

    def sort(self, outputs: Sequence[Output], stats: EngineStats | None) -> Iterator[tuple[bytes, Outputs]]:
        """The messages that tell the front ends of these outputs, and of the statistics if there are any."""
        routes = self._routes
        for output in outputs:
            route = routes.get(output.request)
            if route is None:  # aborted while its step ran
                continue
            front = route.front
            if route.begun and output.finish_reason is None and not output.logprobs:
                tokens = output.tokens
                front.numbers.append(route.number)
                front.counts.append(len(tokens))
                front.tokens += tokens
                continue
            front.full.append((route.number, output))
            route.begun = True
            if output.finish_reason is not None:
                del routes[output.request], front.requests[route.number]
        for peer, front in self._fronts.items():
            message = front.take(stats)
            if message is not None:
                yield peer, message
