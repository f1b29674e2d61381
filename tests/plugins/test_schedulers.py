from __future__ import annotations

from engine.core.kv_cache import BlockManager
from engine.core.scheduler import Scheduler
from engine.core.schedulers import SchedulingPolicy
from engine.core.types import Request, SamplingParams, StepResult
from engine.plugins.schedulers.fcfs import FirstComeFirstServed
from engine.plugins.schedulers.priority import Priority
from engine.testing.schedulers import PolicyConformance, View


class TestFcfsContract(PolicyConformance):
    policy = FirstComeFirstServed


class TestPriorityContract(PolicyConformance):
    policy = Priority


def ids(policy: SchedulingPolicy, *views: View) -> str:
    return "".join(view.id for view in policy.order(views, 0.0))


def test_fcfs_runs_them_as_they_came_whatever_their_priority() -> None:
    views = (View(id="a", priority=2), View(id="b", priority=1, arrival=1.0), View(id="c", arrival=2.0))
    policy = FirstComeFirstServed()
    assert ids(policy, *views) == "abc"
    assert policy.victim(views).id == "c"
    assert policy.preempts(View(id="d", priority=-9), views) is None


def test_priority_runs_the_lowest_number_first_and_equals_as_they_came() -> None:
    views = (
        View(id="a", priority=2),
        View(id="b", priority=1, arrival=1.0),
        View(id="c", priority=2, arrival=2.0),
        View(id="d", priority=-1, arrival=3.0),
        View(id="e", priority=1, arrival=4.0),
    )
    assert ids(Priority(), *views) == "dbeac"


def test_priority_preempts_the_least_urgent_and_among_equals_the_latest() -> None:
    views = (
        View(id="a", priority=2),
        View(id="b", priority=2, arrival=5.0),
        View(id="c", priority=2, arrival=1.0),
        View(id="d", priority=1, arrival=9.0),
    )
    assert Priority().victim(views).id == "b"


def test_priority_displaces_only_who_is_strictly_less_urgent() -> None:
    running = (View(id="a", priority=1), View(id="b", priority=2, arrival=1.0))
    policy = Priority()
    chosen = policy.preempts(View(id="c", priority=1), running)
    assert chosen is not None
    assert chosen.id == "b"
    assert policy.preempts(View(id="c", priority=2), running) is None
    assert policy.preempts(View(id="c", priority=3), running) is None


def order_of_ends(policy: SchedulingPolicy, *requests: tuple[str, int]) -> str:
    """Names of requests (name, priority), added one a step to an engine with one seat, as they finish."""
    scheduler = Scheduler(
        policy, BlockManager(50, 4), max_batch_tokens=64, max_running=1, max_len=100, eos_tokens=frozenset()
    )
    left = list(requests)
    ended = ""
    now = 0.0
    while left or scheduler.has_work:
        now += 1.0
        if left:
            name, priority = left.pop(0)
            params = SamplingParams(max_tokens=4)
            scheduler.add(Request(id=name, prompt=(1, 2, 3), params=params, priority=priority, arrival=now))
        step = scheduler.schedule(now)
        assert step is not None
        result = StepResult(step=step.id, tokens=((5,) * (len(step.decodes) + len(step.chunks)),))
        ended += "".join(output.request for output in scheduler.commit(step, result, now) if output.finish_reason)
    scheduler.check()
    return ended


def test_order_in_a_scheduler() -> None:
    requests = (("a", 1), ("b", 1), ("c", 0), ("d", 2), ("e", 0))
    assert order_of_ends(FirstComeFirstServed(), *requests) == "abcde"
    assert order_of_ends(Priority(), *requests) == "ceabd"
