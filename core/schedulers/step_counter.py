"""How far the plan and the results have come."""

from __future__ import annotations


class StepCounter:
    """Shared by the scheduler, which alone moves it, and its requests.

    planned: id of the last step planned. committed: id of the last step whose result is in; results come in the order
    of planning. ticks: iterations planned so far; a step of k iterations is k ticks.
    """

    __slots__ = ("committed", "planned", "ticks")

    def __init__(self) -> None:
        self.planned = 0
        self.committed = 0
        self.ticks = 0
