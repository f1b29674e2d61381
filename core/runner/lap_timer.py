"""Measures the seconds that a step spends in each phase on the host."""

from __future__ import annotations

import time
from typing import Literal

StepPhase = Literal["prepare", "launch", "sample"]


class LapTimer:
    """Adds up the time of each phase of a step; the phases follow one another without a gap."""

    def __init__(self) -> None:
        self.seconds: dict[StepPhase, float] = {"prepare": 0.0, "launch": 0.0, "sample": 0.0}
        self._begin = time.perf_counter()

    def end(self, phase: StepPhase) -> None:
        """End a phase: the time since the last call, or since the start, is the phase's."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._begin
        self._begin = now
