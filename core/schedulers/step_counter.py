"""Counts the steps and iterations planned so far, and the steps committed."""

from __future__ import annotations


class StepCounter:
    """Shared by the scheduler and its requests; only the scheduler changes it.

    steps_planned: also the id of the last step planned, since ids count from 1.
    steps_committed: the same for steps whose result has been committed; results arrive in the order of planning.
    iterations: iterations planned so far; a step counts as `Step.iterations`.
    """

    __slots__ = ("iterations", "steps_committed", "steps_planned")

    def __init__(self) -> None:
        self.steps_planned = 0
        self.steps_committed = 0
        self.iterations = 0
