"""First come, first served, with several decode iterations per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from engine.core.schedulers import RequestView
from engine.plugins.schedulers.fcfs import FirstComeFirstServed

AUTO = "auto"
AUTO_MAX_STEPS = 8
FULL_STEPS_UP_TO = 16
"""Under "auto", batches up to this size run max_steps iterations per step, larger ones proportionally fewer."""


@frozen(kw_only=True)
class MultiStepOptions:
    """Options of the multi_step policy, [scheduler.options]."""

    steps: int | str = field(default=AUTO)
    """Decode iterations per step, as far as blocks and outputs allow; "auto": 1 while a request waits, else the fewer
    sequences run, the more iterations."""
    max_steps: int | None = field(default=None)
    """Maximum that "auto" chooses; None: 8."""

    @steps.validator
    def _check_steps(self, _: Any, value: int | str) -> None:
        if value != AUTO and (isinstance(value, str) or value < 1):
            raise ValueError(f'steps is {value!r}; give a number from 1 up, or "{AUTO}"')

    @max_steps.validator
    def _check_max_steps(self, _: Any, value: int | None) -> None:
        if value is None:
            return
        if value < 1:
            raise ValueError(f"max_steps is {value}; give a number from 1 up")
        if self.steps != AUTO:
            raise ValueError(f'max_steps bounds steps = "{AUTO}", but steps is {self.steps}; give only one of them')


class MultiStep(FirstComeFirstServed[MultiStepOptions]):
    """Admits as fcfs does, but each step runs k decode iterations, feeding back each token, before the next plan.

    The host plans and commits one step per k tokens of each sequence. The price: a stop, an abort or an arrival takes
    effect up to k - 1 iterations later, for each step in flight (two if the engine plans ahead), and tokens are
    streamed k at a time. Tokens past a stop are computed and discarded.
    """

    api = "1"
    options_class = MultiStepOptions

    def __init__(self, options: MultiStepOptions | None = None) -> None:
        super().__init__(options or MultiStepOptions())
        self._steps = self.options.steps
        self._max_steps = self.options.max_steps or AUTO_MAX_STEPS

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        if self._steps != AUTO:
            return int(self._steps)
        if waiting:
            return 1
        # A large batch needs few iterations: its step takes long enough to hide the host's work.
        return max(1, min(self._max_steps, self._max_steps * FULL_STEPS_UP_TO // len(running)))
