"""Reports to DraftLengths how long the steps of a running engine take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.types import Step


class StepTiming:
    """Times steps from submission to result, and so corrects the times by which draft lengths are chosen.

    The time of a step that overlaps with the step before it is that between the two results. Steps with prefill chunks
    do not count: their rows are not those of decodes.
    """

    def __init__(self, lengths: DraftLengths, *, overlaps: bool, clock: Callable[[], float] = perf_counter) -> None:
        """overlaps: whether the next step is planned while one without drafts runs."""
        self._lengths = lengths
        self._overlaps = overlaps
        self._clock = clock
        self._begins: deque[float] = deque()
        self._last_result = 0.0
        self._steps = 0

    def begin(self) -> None:
        """Note that a step is submitted now."""
        self._begins.append(self._clock())

    def end(self, step: Step) -> None:
        """Note that the result of the oldest step has arrived."""
        now = self._clock()
        seconds = (now - max(self._begins.popleft(), self._last_result)) / step.iterations
        self._last_result = now
        if step.drafts:
            drafts = sum(len(part.tokens) for part in step.drafts)
            if not step.chunks:
                self._lengths.observe(len(step.decodes) + drafts, seconds, drafts=True)
        elif step.decodes and not step.chunks:
            self._lengths.observe(len(step.decodes), seconds, drafts=False)

    def add_host_time(self, total: float) -> None:
        """Note that a step is committed. total: seconds since the start in which the host planned and committed steps.

        While a step with drafts runs, no other can be planned: the host's time per step is added to its time.
        """
        if self._overlaps:
            self._steps += 1
            self._lengths.overhead = total / self._steps

    def forget(self) -> None:
        """Forget the steps in flight."""
        self._begins.clear()
