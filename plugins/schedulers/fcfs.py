"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.core.schedulers import RequestView, SchedulingPolicy

OptionsT = TypeVar("OptionsT")


class FirstComeFirstServed(SchedulingPolicy[OptionsT]):
    """Admits requests in order of arrival, and preempts the one admitted last. Has no options of its own.

    A prompt longer than a step leaves half of the step to the others, as far as they need it.
    """

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return waiting

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[-1]  # the one admitted last has the least to recompute

    def prefill_limit(self, request: RequestView, room: int, others: Sequence[RequestView]) -> int:
        return room // 2
