"""What scheduling costs the host: steps are planned and committed, and a runner that computes nothing answers at once.

    python benchmarks/scheduler.py [--policy fcfs] [--json benchmarks/results/scheduler.json]

One step is in flight while the next is planned, as in the engine. Steady: all sequences decode, their page ends spread
over the steps. Churn: 1000 requests that arrive at once, 512 tokens in and 256 out, 256 of them running. Each figure is
the least of many repeats, since whatever else the machine does only adds to it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from pathlib import Path

from attrs import define

from engine.cli.bench_report import Row, report, write
from engine.core.device import find_device
from engine.core.kv_cache import BlockManager
from engine.core.registry import load_plugins
from engine.core.scheduler import Scheduler
from engine.core.schedulers import SchedulingPolicy
from engine.core.types import Output, Request, SamplingParams, Step, StepResult

PAGE = 16
WINDOW = 4 * PAGE
"""Iterations timed together: each sequence then takes the same number of blocks in any window."""


@define
class Cost:
    """Seconds spent, over how many iterations and tokens."""

    schedule: float = 0.0
    commit: float = 0.0
    iterations: int = 0
    tokens: int = 0


class Loop:
    """The engine's loop around a scheduler."""

    def __init__(self, policy: SchedulingPolicy, *, max_running: int, max_len: int, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(
            policy,
            BlockManager(2 * max_running * max_len // PAGE, PAGE, prefix_caching=prefix_caching),
            max_batch_tokens=8192,
            max_running=max_running,
            max_len=max_len,
            eos_tokens=frozenset({0}),
        )
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.cost = Cost()

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        prompt = tuple(random.Random(name).choices(range(1, 1000), k=prompt_len))
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        self.scheduler.add(Request(id=name, prompt=prompt, params=params))

    def turn(self) -> list[Output]:
        begin = time.perf_counter()
        step = self.scheduler.schedule(begin)
        self.cost.schedule += time.perf_counter() - begin
        if step is not None:
            self.in_flight.append((step, answer(step)))
            self.cost.iterations += step.iterations
            if len(self.in_flight) == 1:
                return []
        earlier, result = self.in_flight.popleft()
        begin = time.perf_counter()
        outputs = self.scheduler.commit(earlier, result, begin)
        self.cost.commit += time.perf_counter() - begin
        self.cost.tokens += len(result.tokens) * len(result.tokens[0])
        return outputs

    def take_cost(self) -> Cost:
        cost, self.cost = self.cost, Cost()
        return cost


def answer(step: Step) -> StepResult:
    """A token for whatever samples; none of them ends a request."""
    row = (7,) * (len(step.decodes) + sum(piece.sample for piece in step.chunks))
    return StepResult(step=step.id, tokens=(row,) * step.iterations)


def steady(policy: SchedulingPolicy, running: int, repeat: int, *, prefix_caching: bool) -> list[Cost]:
    most = (repeat + 3) * WINDOW
    loop = Loop(policy, max_running=running, max_len=128 + most, prefix_caching=prefix_caching)
    for number in range(running):
        loop.add(str(number), 64 + number % PAGE, most)
    costs = []
    for window in range(repeat + 1):
        loop.take_cost()
        while loop.cost.iterations < WINDOW or (window == 0 and loop.in_flight[-1][0].chunks):
            loop.turn()
        costs.append(loop.take_cost())
    return costs[1:]


def churn(policy: SchedulingPolicy, repeat: int, *, prefix_caching: bool) -> list[Cost]:
    costs = []
    for _ in range(repeat):
        loop = Loop(policy, max_running=256, max_len=1024, prefix_caching=prefix_caching)
        for number in range(1000):
            loop.add(str(number), 512, 256)
        while loop.scheduler.has_work or loop.in_flight:
            loop.turn()
        costs.append(loop.take_cost())
    return costs


def rows_of(name: str, costs: list[Cost]) -> list[Row]:
    """A step is one iteration: a step of several counts as so many."""
    rows = []
    for phase in ("schedule", "commit"):
        seconds = min(getattr(cost, phase) for cost in costs)
        rows.append(Row(metric=f"{name}: {phase}", value=1e6 * seconds / costs[0].iterations, unit="us/step"))
        rows.append(Row(metric=f"{name}: {phase}", value=1e6 * seconds / costs[0].tokens, unit="us/request/step"))
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs", help="a registered scheduling policy, with its default options")
    parser.add_argument("--repeat", type=int, default=30, help="windows of steady decode; a tenth as many churns")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    kind = load_plugins().schedulers.get(arguments.policy).load()
    policy = kind(kind.options_class() if kind.options_class else None)
    caching = arguments.prefix_caching
    rows = []
    for running in (1, 64, 256):
        costs = steady(policy, running, arguments.repeat, prefix_caching=caching)
        rows += rows_of(f"decode, {running} running", costs)
    costs = churn(policy, max(1, arguments.repeat // 10), prefix_caching=caching)
    rows += rows_of("1000 requests, 512 in / 256 out", costs)

    print(f"{'':<45}{'us/step':>10}{'us/request/step':>18}")
    for step, request in zip(rows[::2], rows[1::2], strict=True):
        print(f"{step.metric:<45}{step.value:>10.1f}{request.value:>18.3f}")
    if arguments.json is not None:
        settings = {
            "policy": arguments.policy,
            "prefix_caching": caching,
            "page_size": PAGE,
            "repeat": arguments.repeat,
        }
        machine = find_device("cpu").name
        write(arguments.json, report("scheduler", machine, rows, settings))


if __name__ == "__main__":
    main()
