"""Reports to DraftLengths how long the steps of a running engine take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.types import Step

_MAX_HOST_SHARE = 0.5
"""Maximum of the host's time before a step that is counted, relative to the step, where steps do not overlap."""


class StepTiming:
    """Times the steps of a running engine, and so corrects the times by which draft lengths are chosen.

    Where steps overlap, the time of a step is that between its result and the one before. Where they do not, the host's
    time before its submission counts too, since making proposals takes time; it counts as half of the step at most,
    since the engine may have had nothing to do. Steps with prefill chunks do not count: their rows are not those of
    decodes. Nor, where steps overlap, do steps without drafts that had to wait for the result before them: they are the
    exception.
    """

    def __init__(self, lengths: DraftLengths, *, overlaps: bool, clock: Callable[[], float] = perf_counter) -> None:
        """overlaps: whether the next step is planned while one without drafts runs."""
        self._lengths = lengths
        self._overlaps = overlaps
        self._clock = clock
        self._begins: deque[tuple[float, bool]] = deque()
        """Of each step in flight: when it was submitted, and whether no other was in flight then."""
        self._timed: list[tuple[Step, float, float | None]] = []
        """Steps that `learn` has not seen yet: with the seconds of an iteration, and of the gap before a step with
        drafts where steps overlap."""
        self._last_result = 0.0

    def begin(self) -> None:
        """Note that a step is submitted now."""
        self._begins.append((self._clock(), not self._begins))

    def end(self, step: Step) -> None:
        """Note that the result of the oldest step has arrived."""
        now, last_result = self._clock(), self._last_result
        begin, waited = self._begins.popleft()
        self._last_result = now
        if step.chunks:
            return
        seconds = now - max(begin, last_result)
        if not self._overlaps and last_result:
            seconds += min(max(begin - last_result, 0.0), _MAX_HOST_SHARE * seconds)
        if step.drafts:
            self._lengths.probed(step.decode_rows, seconds)
            gap = max(begin - last_result, 0.0) if self._overlaps and last_result else None
            self._timed.append((step, seconds, gap))
        elif step.decodes and not (step.propose or (waited and self._overlaps)):
            self._timed.append((step, seconds / step.iterations, None))

    def learn(self) -> None:
        """Correct the times by the steps that have ended, and prepare the next choice. To be called while the device
        works: earlier, the device may be waiting for the host."""
        lengths = self._lengths
        for step, seconds, gap in self._timed:
            lengths.observe(step.decode_rows, seconds, drafts=bool(step.drafts))
            if gap is not None:
                lengths.gaps.observe(gap, len(step.decodes) + len(step.drafts))
        if self._timed and self._timed[-1][0].drafts:
            lengths.prepare()
        self._timed.clear()

    def forget(self) -> None:
        """Forget the steps in flight."""
        self._begins.clear()
        self._timed.clear()
