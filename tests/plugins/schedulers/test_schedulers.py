from __future__ import annotations

from typing import Any

import pytest

from engine.core.config.structure import structure
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import Request, SamplingParams, Step, StepResult
from engine.plugins.schedulers.fcfs import FirstComeFirstServed
from engine.plugins.schedulers.multi_step import MultiStep, MultiStepOptions
from engine.plugins.schedulers.priority import Priority
from engine.testing.schedulers import PolicyConformance, View


class TestFcfsContract(PolicyConformance):
    policy = FirstComeFirstServed


class TestPriorityContract(PolicyConformance):
    policy = Priority


class TestMultiStepContract(PolicyConformance):
    policy = MultiStep


class TestFixedMultiStepContract(PolicyConformance):
    policy = MultiStep
    options = MultiStepOptions(steps=5)


def ids(policy: SchedulingPolicy, *views: View) -> str:
    return "".join(view.id for view in policy.order(views, 0.0))


def test_fcfs_admits_in_order_of_arrival_whatever_the_priorities() -> None:
    views = (View(id="a", priority=2), View(id="b", priority=1, arrival=1.0), View(id="c", arrival=2.0))
    policy = FirstComeFirstServed()
    assert ids(policy, *views) == "abc"
    assert policy.victim(views).id == "c"
    assert policy.preempts(View(id="d", priority=-9), views) is None


def test_priority_admits_the_lowest_number_first_and_equals_by_arrival() -> None:
    views = (
        View(id="a", priority=2),
        View(id="b", priority=1, arrival=1.0),
        View(id="c", priority=2, arrival=2.0),
        View(id="d", priority=-1, arrival=3.0),
        View(id="e", priority=1, arrival=4.0),
    )
    assert ids(Priority(), *views) == "dbeac"


def test_priority_victim_is_the_least_urgent_and_among_equals_the_latest() -> None:
    views = (
        View(id="a", priority=2),
        View(id="b", priority=2, arrival=5.0),
        View(id="c", priority=2, arrival=1.0),
        View(id="d", priority=1, arrival=9.0),
    )
    assert Priority().victim(views).id == "b"


def test_priority_preempts_only_strictly_less_urgent_requests() -> None:
    running = (View(id="a", priority=1), View(id="b", priority=2, arrival=1.0))
    policy = Priority()
    chosen = policy.preempts(View(id="c", priority=1), running)
    assert chosen is not None
    assert chosen.id == "b"
    assert policy.preempts(View(id="c", priority=2), running) is None
    assert policy.preempts(View(id="c", priority=3), running) is None


def finish_order(policy: SchedulingPolicy, *requests: tuple[str, int]) -> str:
    """Names of requests in the order they finish. One (name, priority) is added per step; max_running is 1."""
    scheduler = Scheduler(
        policy, BlockManager(50, 4), max_batch_tokens=64, max_running=1, max_len=100, eos_tokens=frozenset()
    )
    left = list(requests)
    finished = ""
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
        finished += "".join(output.request for output in scheduler.commit(step, result, now) if output.finish_reason)
    scheduler.check()
    return finished


def test_requests_finish_in_the_order_of_the_policy() -> None:
    requests = (("a", 1), ("b", 1), ("c", 0), ("d", 2), ("e", 0))
    assert finish_order(FirstComeFirstServed(), *requests) == "abcde"
    assert finish_order(Priority(), *requests) == "ceabd"


def steps(running: int, waiting: int = 0, **options: Any) -> int:
    views = tuple(View(id=str(number)) for number in range(running + waiting))
    return MultiStep(MultiStepOptions(**options)).decode_steps(views[:running], views[running:])


def test_auto_steps_decrease_with_batch_size_and_waiting_requests() -> None:
    assert [steps(running) for running in (1, 16, 17, 32, 64, 128, 129, 1000)] == [8, 8, 7, 4, 2, 1, 1, 1]
    assert [steps(running, max_steps=32) for running in (1, 16, 128)] == [32, 32, 4]
    assert steps(1, waiting=1) == 1


def test_fixed_steps_do_not_depend_on_the_requests() -> None:
    assert [steps(running, waiting, steps=6) for running, waiting in ((1, 0), (1, 3), (500, 0))] == [6, 6, 6]
    assert MultiStep().options == MultiStepOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, 'steps is 0; give a number from 1 up, or "auto"'),
        ({"steps": "many"}, "steps is 'many'; give a number from 1 up, or \"auto\""),
        ({"steps": 2.5}, "steps: expected a whole number or a string"),
        ({"max_steps": 0}, "max_steps is 0; give a number from 1 up"),
        ({"steps": 4, "max_steps": 8}, 'max_steps bounds steps = "auto", but steps is 4; give only one of them'),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], message: str) -> None:
    _, problems = structure(options, MultiStepOptions, "scheduler.options")
    assert [message in problem for problem in problems] == [True]


def test_stop_abort_and_arrival_take_effect_with_the_next_step() -> None:
    """Each is delayed by at most the k iterations in flight."""
    scheduler = Scheduler(
        MultiStep(MultiStepOptions(steps=4)),
        BlockManager(50, 4),
        max_batch_tokens=64,
        max_running=8,
        max_len=100,
        eos_tokens=frozenset({0}),
    )

    def add(name: str) -> None:
        scheduler.add(Request(id=name, prompt=(1, 2, 3), params=SamplingParams(max_tokens=50)))

    def plan() -> Step:
        step = scheduler.schedule(0.0)
        assert step is not None
        return step

    for name in "abc":
        add(name)
    first = plan()
    scheduler.commit(first, StepResult(step=first.id, tokens=((5, 5, 5),)), 0.0)
    step = plan()
    assert (step.decodes, step.iterations) == ((1, 2, 3), 4)
    add("d")
    assert scheduler.abort("b") is not None
    outputs = scheduler.commit(step, StepResult(step=step.id, tokens=((5, 5, 5), (0, 5, 5), (6, 6, 6), (7, 7, 7))), 0.0)
    assert [(output.request, output.tokens) for output in outputs] == [("a", (5, 0)), ("c", (5, 5, 6, 7))]
    step = plan()
    assert (step.decodes, step.iterations, step.finished) == ((3,), 1, (2, 1))
    assert [new.sequence for new in step.new] == [4]
    assert scheduler.stats().blocks_used == 2 + 1, "c has computed 7 tokens and now its eighth, d its prompt of 3"
