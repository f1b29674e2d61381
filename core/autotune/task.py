"""A tuning task: one op at one row class, with the layers that share it; and the timer that measures its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import field, frozen

from engine.core.autotune.op import AutotunedOp, Operands
from engine.core.autotune.results import TuningResult


class CandidateError(Exception):
    """A candidate does not compile or exceeds the GPU's resources. The message says why."""


@frozen(kw_only=True, eq=False)
class TuningTask:
    """One row class of all ops with one key."""

    rows: int
    ops: list[AutotunedOp[Any]] = field(factory=list)
    """Ops with equal keys; each keeps its own choice."""
    operands: list[Operands] = field(factory=list)
    """The operands of all layers."""
    failures: dict[str, str] = field(factory=dict)
    """Names of candidates that cannot run -> why."""

    @property
    def op(self) -> AutotunedOp[Any]:
        """The op that is measured on behalf of all."""
        return self.ops[0]

    @property
    def key(self) -> tuple[str, int]:
        """Key of the task's result in the cache."""
        return self.op.key, self.rows

    def add(self, op: AutotunedOp[Any], operands: Operands) -> None:
        """Add a layer."""
        if not any(op is one for one in self.ops):
            self.ops.append(op)
        self.operands.append(operands)

    def find(self, result: TuningResult | None) -> list[Any]:
        """The candidate of a cached result, alone. Empty: there is no result, or it no longer holds."""
        op = self.op
        if result is None or result.version != op.version:
            return []
        first = op.candidates(self.rows)
        every = [*first, *(more for one in first for more in op.refine(self.rows, [one]))]
        return [one for one in every if op.name(one) == result.candidate][:1]

    def choose(self, candidate: Any) -> None:
        """Use a candidate in all layers."""
        for op in self.ops:
            op.choose(self.rows, candidate)


class Timer(Protocol):
    """Measures candidates."""

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """Begin to compile the candidates that `seconds` will be called with."""

    def seconds(self, task: TuningTask, candidate: Any) -> float:
        """Seconds of one product whose weights are not in the L2 cache. Raises CandidateError."""
