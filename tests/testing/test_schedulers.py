"""The policy suite finds the mistakes it is there to find, and passes a correct policy."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engine.core.errors import PluginError
from engine.core.schedulers.policy import SchedulingPolicy, Split
from engine.testing.schedulers import PolicyConformance


class Latest(SchedulingPolicy):
    """Last come, first served; faulty classes below change one thing."""

    api = "1"

    def order(self, waiting, now):
        return sorted(waiting, key=lambda view: -view.arrival)

    def victim(self, running):
        return running[0]


class TestLatest(PolicyConformance):
    policy = Latest


class Displacing(Latest):
    def preempts(self, candidate, running):
        return next((view for view in running if view.priority > candidate.priority), None)

    def decode_steps(self, running, waiting):
        return 3

    def split(self, budget, waiting, running):
        return Split(decode=budget, prefill=budget // 2)


class TestDisplacing(PolicyConformance):
    policy = Displacing


class Twice(Latest):
    def order(self, waiting, now):
        return [*waiting, *waiting]


class Stranger(Latest):
    def order(self, waiting, now):
        return [evolve(view, id="stranger") for view in waiting]


class Moody(Latest):
    count = 0

    def order(self, waiting, now):
        type(self).count += 1
        return list(waiting)[:: -1 if self.count % 2 else 1]


class StrangeVictim(Latest):
    def victim(self, running):
        return evolve(running[0])


class Feud(Latest):
    def preempts(self, candidate, running):
        return running[0]


class Negative(Latest):
    def split(self, budget, waiting, running):
        return Split(decode=-1, prefill=budget)


class NoSteps(Latest):
    def decode_steps(self, running, waiting):
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
def test_a_fault_is_found(policy: type[SchedulingPolicy], test: str) -> None:
    suite: Any = type("Suite", (PolicyConformance,), {"policy": policy})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(0)


def test_the_workload_stops_at_an_impossible_answer() -> None:
    class Impossible(Latest):
        def order(self, waiting, now):
            return ["somebody"]

    suite: Any = type("Suite", (PolicyConformance,), {"policy": Impossible})()
    with pytest.raises(PluginError, match="Impossible"):
        suite.test_every_request_ends(0, 12)
