"""Lowest priority number first."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers import RequestView, SchedulingPolicy


class Priority(SchedulingPolicy[None]):
    """Admits requests of the lowest priority number first, equal ones in order of arrival.

    A waiting request preempts a running one of a higher number if there is no room for both.
    """

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return sorted(waiting, key=lambda request: request.priority)  # stable: equal ones stay in order of arrival

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return max(running, key=lambda request: (request.priority, request.arrival))

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        victim = self.victim(running)
        return victim if victim.priority > candidate.priority else None
