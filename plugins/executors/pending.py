"""In-flight steps that workers compute."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import ExecutorError
from engine.core.types import StepResult


class Pending:
    """One in-flight step (a PendingResult)."""

    def __init__(self, step: int, collect: Callable[[], None], ready: Callable[[], bool]) -> None:
        """collect: waits for the result of the oldest in-flight step and resolves its Pending; ready: whether `collect`
        returns without waiting."""
        self.step = step
        self._collect = collect
        self._ready = ready
        self._result: StepResult | None = None

    def complete(self, result: StepResult) -> None:
        """Resolve this step. Raises ExecutorError for the result of another step."""
        if result.step != self.step:
            raise ExecutorError(f"the workers answered step {result.step}, but step {self.step} is due")
        self._result = result

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        while self._result is None and self._ready():
            self._collect()
        return self._result is not None

    def result(self) -> StepResult:
        """Wait for the step. Raises ExecutorError."""
        while self._result is None:
            self._collect()
        return self._result
