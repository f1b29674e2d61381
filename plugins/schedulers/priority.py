"""Lowest priority number first."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from engine.core.schedulers import RequestView, SchedulingPolicy

_priority = attrgetter("priority")
_arrival = attrgetter("arrival")


class Priority(SchedulingPolicy[None]):
    """Admits requests of the lowest priority number first, equal ones in order of arrival.

    A waiting request preempts a running one of a higher number if there is no room for both. A prompt longer than a
    step leaves half of the step to others of the same or a lower number, as far as they need it.
    """

    api = "1"

    def __init__(self, options: None = None) -> None:
        super().__init__(options)
        self._waiting: tuple[RequestView, ...] = ()  # as of the last call of `order`
        self._ordered: tuple[RequestView, ...] = ()

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        if self._waiting != (waiting := tuple(waiting)):
            self._waiting = waiting
            self._ordered = tuple(sorted(waiting, key=_priority))  # stable: equal ones stay in order of arrival
        return self._ordered

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return _latest(running, max(map(_priority, running)))

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        least_urgent = max(map(_priority, running))
        return _latest(running, least_urgent) if least_urgent > candidate.priority else None

    def prefill_limit(self, request: RequestView, room: int, others: Sequence[RequestView]) -> int:
        return room // 2 if any(other.priority <= request.priority for other in others) else room


def _latest(requests: Sequence[RequestView], priority: int) -> RequestView:
    """The last to arrive of the requests with this priority number."""
    return max((request for request in requests if request.priority == priority), key=_arrival)
