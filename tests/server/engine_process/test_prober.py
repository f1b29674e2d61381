from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.types import EngineStats
from engine.server.engine_process import prober
from engine.server.engine_process.prober import Prober


class Engine:
    """Computes each request in one step."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Any) -> None:
        self.requests.append(request)

    def step(self) -> None:
        self.requests.clear()
        self.steps += 1

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps)


def run(monkeypatch: pytest.MonkeyPatch, seconds: int, busy: frozenset[int] = frozenset()) -> list[int]:
    """The seconds at which an engine computes a step that is checked every 3 idle seconds; busy: with a request."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(prober, "time", SimpleNamespace(monotonic=lambda: clock.now))
    engine: Any = Engine()
    heartbeat: Any = SimpleNamespace(request_step=lambda: None, record_step=lambda: None)
    probing, computed = Prober(engine, heartbeat, 3.0), []
    for second in range(seconds):
        clock.now = float(second)
        if second in busy:
            engine.add("a user's")
        probing.before_step()
        if engine.has_work:
            engine.step()
            computed.append(second)
        probing.after_step()
    return computed


def test_prober_requests_a_step_once_per_interval_while_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 11) == [3, 6, 9]


def test_prober_counts_the_interval_from_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 11, busy=frozenset((2, 7))) == [2, 5, 7, 10]
