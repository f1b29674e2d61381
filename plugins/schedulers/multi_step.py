"""First come, first served, with several decode steps issued at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from engine.core.schedulers import RequestView
from engine.plugins.schedulers.fcfs import FirstComeFirstServed

AUTO = "auto"
AUTO_MAX_STEPS = 8
FULL_STEPS_UP_TO = 16
"""Under "auto", so many sequences decode for the most steps at once; twice as many for half of them, and so on."""


@frozen(kw_only=True)
class MultiStepOptions:
    """[scheduler.options]."""

    steps: int | str = field(default=AUTO)
    """Decode steps issued at once, as far as blocks and outputs allow; "auto": one while a request waits, else the more
    the fewer sequences run."""
    max_steps: int | None = field(default=None)
    """Most steps that "auto" issues at once; by default 8."""

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


class MultiStep(FirstComeFirstServed):
    """As fcfs, but a step repeats itself k times, feeding back each token, before it comes back to the scheduler.

    The host then plans and takes in one step for k tokens of each sequence. The price: a stop, an abort or an arrival
    is honoured up to k - 1 token times later, for each step under way (two where the engine plans ahead), and tokens
    are streamed k at a time. Tokens past a stop are computed and discarded.
    """

    api = "1"
    options_class = MultiStepOptions

    def __init__(self, options: MultiStepOptions | None = None) -> None:
        super().__init__(options or MultiStepOptions())
        self._steps = self.options.steps
        self._max_steps = self.options.max_steps or AUTO_MAX_STEPS

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        """The fixed number, or one that falls with the batch: a long step has host time enough to hide behind it."""
        if self._steps != AUTO:
            return int(self._steps)
        if waiting:
            return 1
        return max(1, min(self._max_steps, self._max_steps * FULL_STEPS_UP_TO // len(running)))
