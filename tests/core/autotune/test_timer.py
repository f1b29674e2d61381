"""What GraphTimer runs, and which errors are CandidateErrors. No GPU: replays are replaced by calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from engine.core.autotune.op import AutotunedOp, Operands
from engine.core.autotune.task import CandidateError, TuningTask
from engine.core.autotune.timer import MAX_CALLS, GraphTimer


class Sum(AutotunedOp[str]):
    """Records the arguments of `run`."""

    key, version, inputs, dtype, row_classes = "sum", "1", 16, torch.float32, (4,)

    def __init__(self) -> None:
        self.ran = []

    def candidates(self, rows: Any) -> Any:
        return ["right"]

    def compile(self, rows: Any, candidate: Any, operands: Any) -> None:
        raise AssertionError

    def run(self, candidate: Any, x: Any, operands: Any) -> Any:
        if candidate == "too large":
            raise OutOfResources(300, 200, "shared memory")
        if candidate == "not lowered":
            raise RuntimeError("PassManager::run failed")
        if candidate == "a mistake":
            raise TypeError("no such argument")
        self.ran.append((tuple(x.shape), operands))
        return x

    def choose(self, rows: Any, candidate: Any) -> None:
        raise AssertionError


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = object.__new__(GraphTimer)
    made._device = torch.device("cpu")
    made._cache_bytes = 4096
    monkeypatch.setattr(made, "replayed", lambda calls: calls() or 6.0)
    return made


def task(layers: Any, numbers: Any) -> Any:
    op = Sum()
    made = TuningTask(rows=4)
    for _ in range(layers):
        made.add(op, Operands(weights={"weight": torch.zeros(numbers)}))
    return made


@pytest.mark.parametrize(
    ("layers", "numbers", "timed"),
    [(1, 4096, 1), (8, 4096, 2), (8, 512, 6), (3, 512, 3), (100, 4, MAX_CALLS)],
)
def test_seconds_rotates_over_more_weights_than_the_cache_holds(
    timer: Any, layers: int, numbers: int, timed: Any
) -> None:
    one = task(layers, numbers)
    assert timer.seconds(one, "right") == 6.0 / timed
    _, *ran = one.op.ran
    assert [operands for _, operands in ran] == one.operands[:timed]
    assert {shape for shape, _ in ran} == {(4, 16)}


def test_seconds_raises_candidate_error_for_resources_and_compiler_errors_only(timer: Any) -> None:
    with pytest.raises(CandidateError, match=r"OutOfResources: .*shared memory, Required: 300"):
        timer.seconds(task(1, 1), "too large")
    with pytest.raises(CandidateError, match="RuntimeError: PassManager"):
        timer.seconds(task(1, 1), "not lowered")
    with pytest.raises(TypeError):
        timer.seconds(task(1, 1), "a mistake")
