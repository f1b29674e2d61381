"""PolicyConformance passes a correct policy and fails policies with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split
from engine.testing.schedulers import PolicyConformance


class Latest(SchedulingPolicy):
    """Last come, first served, correct. The faulty policies below override one method."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Any:
        return sorted(waiting, key=lambda view: -view.arrival)

    def victim(self, running: Sequence[RequestView]) -> Any:
        return running[0]


class TestLatest(PolicyConformance):
    policy = Latest


class Preempting(Latest):
    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return next((view for view in running if view.priority > candidate.priority), None)

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        return 3

    def split(self, budget: int, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> Split:
        return Split(decode=budget, prefill=budget // 2)


class TestPreempting(PolicyConformance):
    policy = Preempting


class Twice(Latest):
    def order(self, waiting: Sequence[RequestView], now: float) -> Any:
        return [*waiting, *waiting]


class Stranger(Latest):
    def order(self, waiting: Sequence[RequestView], now: float) -> Any:
        return [evolve(view, id="stranger") for view in waiting]


class Moody(Latest):
    count = 0

    def order(self, waiting: Sequence[RequestView], now: float) -> Any:
        type(self).count += 1
        return list(waiting)[:: -1 if self.count % 2 else 1]


class StrangeVictim(Latest):
    def victim(self, running: Sequence[RequestView]) -> Any:
        return evolve(running[0])


class Feud(Latest):
    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return running[0]


class Negative(Latest):
    def split(self, budget: int, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> Split:
        return Split(decode=-1, prefill=budget)


class NoSteps(Latest):
    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        return 0


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (Twice, "test_order"),
        (Stranger, "test_order"),
        (Moody, "test_order"),
        (StrangeVictim, "test_victim"),
        (Feud, "test_preempts"),
        (Negative, "test_split_and_decode_steps"),
        (NoSteps, "test_split_and_decode_steps"),
    ],
)
def test_suite_fails_a_faulty_policy(policy: type[SchedulingPolicy], test: str) -> None:
    suite: Any = type("Suite", (PolicyConformance,), {"policy": policy})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(0)


def test_workload_fails_on_an_invalid_answer() -> None:
    class Impossible(Latest):
        def order(self, waiting: Sequence[RequestView], now: float) -> Any:
            return ["somebody"]

    suite: Any = type("Suite", (PolicyConformance,), {"policy": Impossible})()
    with pytest.raises(AssertionError, match=r"the policy failed in \d+ decisions"):
        suite.test_every_request_finishes(0, 12)
