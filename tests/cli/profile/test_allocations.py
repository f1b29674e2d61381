"""`engine profile allocations`: an engine that keeps what each step allocates."""

from __future__ import annotations

from typing import Any, cast

from engine.cli.profile.allocations import traced
from engine.core.types import EngineStats, Request, SamplingParams


class Leaking:
    """Runs requests one token per step, and keeps a kilobyte of each step for ever."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []
        self.left: list[int] = []
        self.steps = self.tokens = 0

    @property
    def has_work(self) -> bool:
        return any(self.left)

    def add(self, request: Request) -> None:
        self.left.append(request.params.max_tokens or 0)

    def step(self) -> None:
        self.steps += 1
        self.kept.append(bytearray(1000))
        self.tokens += sum(count > 0 for count in self.left)
        self.left = [max(0, count - 1) for count in self.left]

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps, generation_tokens=self.tokens)


def test_the_line_that_keeps_memory_is_first_halfway_and_at_the_end() -> None:
    requests = [Request(id=str(number), prompt=(1,), params=SamplingParams(max_tokens=40)) for number in range(2)]
    halfway, after = traced(cast("Any", Leaking()), requests, 1)
    assert (halfway.steps, after.steps, after.requests) == (20, 40, 2)
    assert "test_allocations.py" in halfway.lines[0].place
    assert 20_000 < halfway.lines[0].bytes < 30_000
    assert 40_000 < after.lines[0].bytes < 60_000
