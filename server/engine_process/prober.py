"""Proves that the engine still computes: by steps of users' requests, or by a one-token request when there are none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.core.types import Request, SamplingParams
from engine.server.shared.heartbeat import Heartbeat

if TYPE_CHECKING:
    from engine.core.engine import Engine

NAME = "engine-health"
"""ID of the one-token request. No front end has asked for the request, so its output is dropped."""


class Prober:
    """Requests a step after a period of idleness or on demand, and records in the heartbeat when one has completed."""

    def __init__(self, engine: Engine, heartbeat: Heartbeat, interval: float) -> None:
        """interval: seconds of idleness; 0: only on demand."""
        self._engine = engine
        self._heartbeat = heartbeat
        self._interval = interval
        self._last_busy = time.monotonic()
        self._requested = False
        self._steps_before = 0

    def request_step(self) -> None:
        """Require a step to complete from now on."""
        if not self._requested:
            self._requested = True
            self._steps_before = self._engine.stats().steps
            self._heartbeat.request_step()

    def before_step(self) -> None:
        """Add the one-token request if a step is required and the engine has no users' requests."""
        now = time.monotonic()
        if self._engine.has_work:
            self._last_busy = now
            return
        if self._interval and now - self._last_busy >= self._interval:
            self.request_step()
        if self._requested:
            self._last_busy = now
            params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
            self._engine.add(Request(id=NAME, prompt=(0,), params=params, arrival=now, salt=NAME))

    def after_step(self) -> None:
        """Record a step that has completed since it was required."""
        if self._requested and self._engine.stats().steps > self._steps_before:
            self._requested = False
            self._heartbeat.record_step()
