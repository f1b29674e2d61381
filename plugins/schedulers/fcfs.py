"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers import RequestView, SchedulingPolicy


class FirstComeFirstServed(SchedulingPolicy):
    """Runs requests in the order of their arrival, and preempts the one admitted last."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """As they arrived."""
        return waiting

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The one admitted last: it has the least to compute again."""
        return running[-1]
