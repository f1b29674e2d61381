"""What scheduling costs the host: steps are planned and committed, and a runner that computes nothing answers at once.

    python benchmarks/scheduler.py [--policy fcfs] [--json benchmarks/results/scheduler.json]

One step is in flight while the next is planned, as in the engine. Steady: all sequences decode, their page ends spread
over the steps. Churn: 1000 requests that are there at once, 512 tokens in and 256 out, of which 256 run. The same turns
are timed many times over, and of each turn the least time counts, since whatever else the machine does only adds to it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from attrs import Factory, define

from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.plugin_host import load_plugins
from engine.core.schedulers import BlockManager, Scheduler, SchedulingPolicy
from engine.core.types import Request, SamplingParams, Step, StepResult

PAGE = 16
WINDOW = 4 * PAGE
"""Turns that are timed together, after which everything is as it was but for longer sequences."""
MOST_STEPS = 8
"""Decode steps issued at once for which the sequences of steady decode are long enough."""


@define
class Times:
    """Of a row of turns: seconds of each, and what was done in all of them."""

    schedule: list[float] = Factory(list)
    commit: list[float] = Factory(list)
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

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        prompt = tuple(random.Random(name).choices(range(1, 1000), k=prompt_len))
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        self.scheduler.add(Request(id=name, prompt=prompt, params=params))

    def turn(self, times: Times) -> None:
        """Plan a step, and commit the one before."""
        begin = time.perf_counter()
        step = self.scheduler.schedule(begin)
        times.schedule.append(time.perf_counter() - begin)
        if step is not None:
            self.in_flight.append((step, answer(step)))
            times.iterations += step.iterations
        if step is None or len(self.in_flight) > 1:
            earlier, result = self.in_flight.popleft()
            begin = time.perf_counter()
            self.scheduler.commit(earlier, result, begin)
            times.commit.append(time.perf_counter() - begin)
            times.tokens += len(result.tokens) * len(result.tokens[0])


def answer(step: Step) -> StepResult:
    """A token for whatever samples; none of them ends a request."""
    row = (7,) * (len(step.decodes) + sum(piece.sample for piece in step.chunks))
    return StepResult(step=step.id, tokens=(row,) * step.iterations)


def steady(policy: SchedulingPolicy, running: int, repeat: int, *, prefix_caching: bool) -> list[Times]:
    most = (repeat + 3) * WINDOW * MOST_STEPS
    loop = Loop(policy, max_running=running, max_len=128 + most, prefix_caching=prefix_caching)
    for number in range(running):
        loop.add(str(number), 64 + number % PAGE, most)
    windows = []
    for _ in range(repeat + 1):
        windows.append(Times())
        for _ in range(WINDOW):
            loop.turn(windows[-1])
    return windows[1:]  # the prompts are in the first


def churn(policy: SchedulingPolicy, repeat: int, *, prefix_caching: bool) -> list[Times]:
    rounds = []
    for _ in range(repeat):
        rounds.append(Times())
        loop = Loop(policy, max_running=256, max_len=1024, prefix_caching=prefix_caching)
        for number in range(1000):
            loop.add(str(number), 512, 256)
        while loop.scheduler.has_work or loop.in_flight:
            loop.turn(rounds[-1])
    return rounds


def least(repeats: Sequence[Sequence[float]]) -> float:
    """Microseconds of all turns together, each at its quickest."""
    return 1e6 * sum(min(same) for same in zip(*repeats, strict=True))


def rows_of(name: str, repeats: Sequence[Times]) -> list[Row]:
    """A step of several iterations counts as so many."""
    rows = []
    for phase in ("schedule", "commit"):
        spent = least([getattr(times, phase) for times in repeats])
        rows.append(Row(metric=f"{name}: {phase}", value=spent / repeats[0].iterations, unit="us/step"))
        rows.append(Row(metric=f"{name}: {phase}", value=spent / repeats[0].tokens, unit="us/request/step"))
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs", help="a registered scheduling policy, with its default options")
    parser.add_argument("--repeat", type=int, default=30, help="windows of steady decode; a third as many churns")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    kind = load_plugins().schedulers.get(arguments.policy).load()
    policy = kind(kind.options_class() if kind.options_class else None)
    caching = arguments.prefix_caching
    rows = []
    for running in (1, 64, 256):
        windows = steady(policy, running, arguments.repeat, prefix_caching=caching)
        rows += rows_of(f"decode, {running} running", windows)
    rounds = churn(policy, max(1, arguments.repeat // 3), prefix_caching=caching)
    rows += rows_of("1000 requests, 512 in / 256 out", rounds)

    print(f"{'':<45}{'us/step':>10}{'us/request/step':>18}")
    for step, request in zip(rows[::2], rows[1::2], strict=True):
        print(f"{step.metric:<45}{step.value:>10.1f}{request.value:>18.3f}")
    if arguments.json is not None:
        settings = {
            "policy": arguments.policy,
            "prefix_caching": caching,
            "block_size": PAGE,
            "repeat": arguments.repeat,
        }
        write(arguments.json, report("scheduler", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
