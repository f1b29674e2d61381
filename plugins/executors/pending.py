"""A step that workers compute; see executors.PendingResult."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import ExecutorError
from engine.core.types import StepResult


class Pending:
    """A step under way. `collect` waits for the result of the oldest one, and gives it to who holds that."""

    def __init__(self, step: int, collect: Callable[[], None], ready: Callable[[], bool]) -> None:
        self.step = step
        self._collect = collect
        self._ready = ready
        self._result: StepResult | None = None

    def complete(self, result: StepResult) -> None:
        """Its result has come, which is the next in order. Raises ExecutorError if it is another step's."""
        if result.step != self.step:
            raise ExecutorError(f"the workers answered step {result.step}, but step {self.step} is due")
        self._result = result

    def done(self) -> bool:
        """Whether `result` returns at once."""
        while self._result is None and self._ready():
            self._collect()
        return self._result is not None

    def result(self) -> StepResult:
        """Wait for the step. Raises ExecutorError."""
        while self._result is None:
            self._collect()
        return self._result
