"""What is timed, and what becomes of candidates that fail. On a CPU nothing is: replays are replaced by calls."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from engine.core.autotune.op import AutotunedOp, Operands
from engine.core.autotune.timer import MOST_CALLS, GraphTimer
from engine.core.autotune.tuner import CandidateError, TuningTask


class Sum(AutotunedOp[str]):
    """Notes what it is run with."""

    key, version, inputs, dtype, classes = "sum", "1", 16, torch.float32, (4,)

    def __init__(self):
        self.ran = []

    def candidates(self, rows):
        return ["right"]

    def compile(self, rows, candidate, operands):
        raise AssertionError

    def run(self, candidate, x, operands):
        if candidate == "too large":
            raise OutOfResources(300, 200, "shared memory")
        if candidate == "not lowered":
            raise RuntimeError("PassManager::run failed")
        if candidate == "a mistake":
            raise TypeError("no such argument")
        self.ran.append((tuple(x.shape), operands))
        return x

    def choose(self, rows, candidate):
        raise AssertionError


@pytest.fixture
def timer(monkeypatch):
    made = object.__new__(GraphTimer)
    made._device = torch.device("cpu")
    made._cache_bytes = 4096
    monkeypatch.setattr(made, "replayed", lambda calls: calls() or 6.0)
    return made


def work(layers, numbers):
    tunable = Sum()
    made = TuningTask(rows=4)
    for _ in range(layers):
        made.add(tunable, Operands(weights={"weight": torch.zeros(numbers)}))
    return made


@pytest.mark.parametrize(
    ("layers", "numbers", "timed"),
    [(1, 4096, 1), (8, 4096, 2), (8, 512, 6), (3, 512, 3), (100, 4, MOST_CALLS)],
)
def test_as_many_layers_as_the_cache_cannot_keep_take_turns(timer, layers, numbers, timed):
    one = work(layers, numbers)
    assert timer.seconds(one, "right") == 6.0 / timed
    _, *ran = one.tunable.ran
    assert [operands for _, operands in ran] == one.operands[:timed]
    assert {shape for shape, _ in ran} == {(4, 16)}


def test_what_the_gpu_lacks_or_the_compiler_cannot_is_told_and_a_mistake_is_none(timer):
    with pytest.raises(CandidateError, match=r"OutOfResources: .*shared memory, Required: 300"):
        timer.seconds(work(1, 1), "too large")
    with pytest.raises(CandidateError, match="RuntimeError: PassManager"):
        timer.seconds(work(1, 1), "not lowered")
    with pytest.raises(TypeError):
        timer.seconds(work(1, 1), "a mistake")
