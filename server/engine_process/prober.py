"""Proof that the engine computes: steps of users' requests, and where there are none, a request of one token."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.core.types import Request, SamplingParams
from engine.server.shared.heartbeat import Heartbeat

if TYPE_CHECKING:
    from engine.core.engine import Engine

NAME = "engine-health"
"""The request's; nobody has asked for it, so that its output goes nowhere."""


class Prober:
    """Asks for a proof after a time of idleness or on demand, and notes it when it comes."""

    def __init__(self, engine: Engine, pulse: Heartbeat, interval: float) -> None:
        """interval: seconds of idleness; 0: only on demand."""
        self._engine = engine
        self._pulse = pulse
        self._interval = interval
        self._worked = time.monotonic()
        self._asked = False
        self._steps = 0

    def ask(self) -> None:
        """A step is to be computed from now on."""
        if not self._asked:
            self._asked = True
            self._steps = self._engine.stats().steps
            self._pulse.ask()

    def before_step(self) -> None:
        """See to it that there is a step, if one is wanted. Users' requests, where there are any, are as good."""
        now = time.monotonic()
        if self._engine.has_work:
            self._worked = now
            return
        if self._interval and now - self._worked >= self._interval:
            self.ask()
        if self._asked:
            params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
            self._engine.add(Request(id=NAME, prompt=(0,), params=params, arrival=now, salt=NAME))

    def after_step(self) -> None:
        """Look whether a step was completed meanwhile."""
        if self._asked and self._engine.stats().steps > self._steps:
            self._asked = False
            self._pulse.prove()
