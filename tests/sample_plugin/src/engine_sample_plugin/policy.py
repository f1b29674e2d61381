"""Shortest prompt first."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers import RequestView, SchedulingPolicy


class ShortestFirst(SchedulingPolicy):
    """Runs short prompts before long ones, and of equal lengths the request that arrived first."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Sort by length of the prompt; equal lengths stay in the order of arrival."""
        return sorted(waiting, key=lambda request: request.prompt_tokens)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The request with the longest prompt, of equal lengths the one admitted last."""
        return max(reversed(running), key=lambda request: request.prompt_tokens)
