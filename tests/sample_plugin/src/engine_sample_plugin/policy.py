"""Shortest prompt first."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.schedulers import RequestView, SchedulingPolicy


class ShortestFirst(SchedulingPolicy):
    """Lets short prompts pass long ones; among equals, who came first."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By length; the sort keeps the order of arrival among equals."""
        return sorted(waiting, key=lambda request: request.prompt_tokens)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The longest prompt, of equals the one admitted last."""
        return max(reversed(running), key=lambda request: request.prompt_tokens)
