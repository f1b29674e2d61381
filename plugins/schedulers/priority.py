"""The most urgent first."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers import RequestView, SchedulingPolicy


class Priority(SchedulingPolicy):
    """Runs requests of the lowest priority number first, equal ones in the order of arrival.

    A waiting request takes the place of a running one that is less urgent.
    """

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By priority, then by arrival: the sort keeps the order of equals."""
        return sorted(waiting, key=lambda request: request.priority)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The least urgent; among equals the one that arrived last."""
        return max(running, key=lambda request: (request.priority, request.arrival))

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        """The victim, if it is less urgent than the candidate."""
        victim = self.victim(running)
        return victim if victim.priority > candidate.priority else None
