"""Measures the host time of planning and committing steps; a fake runner returns results immediately.

    python benchmarks/scheduler.py [--policy fcfs] [--json benchmarks/results/scheduler.json]

One step is in flight while the next is planned, as in the engine. Steady: all sequences decode, and their block
boundaries are spread over the steps. Churn: 1000 requests that arrive together, 512 tokens in and 256 out, of which 256
run. The same steps are timed many times, and the minimum of each step counts, since other load only adds time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define

from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.plugin_host import load_plugins
from engine.core.schedulers import BlockManager, Scheduler, SchedulingPolicy
from engine.core.types import Request, SamplingParams, Step, StepResult

BLOCK_SIZE = 16
WINDOW = 4 * BLOCK_SIZE
"""Steps per window. Each window repeats the same events with longer sequences."""
MAX_STEPS = 8
"""Maximum iterations per step for which the sequences of steady decode are long enough."""


@define
class Times:
    """Seconds of each of several steps, and the iterations and tokens of all of them."""

    schedule: list[float] = Factory(list)
    commit: list[float] = Factory(list)
    iterations: int = 0
    tokens: int = 0


class Loop:
    """Runs a scheduler as Engine.step does."""

    def __init__(self, policy: SchedulingPolicy[Any], *, max_running: int, max_len: int, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(
            policy,
            BlockManager(2 * max_running * max_len // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=prefix_caching),
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

    def step(self, times: Times) -> None:
        """Plan a step, and commit the previous one."""
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
    """A result with one token per sequence that samples; no token ends a request."""
    row = (7,) * (len(step.decodes) + sum(chunk.sample for chunk in step.chunks))
    return StepResult(step=step.id, tokens=(row,) * step.iterations)


def steady(policy: SchedulingPolicy[Any], running: int, repeat: int, *, prefix_caching: bool) -> list[Times]:
    max_tokens = (repeat + 3) * WINDOW * MAX_STEPS
    loop = Loop(policy, max_running=running, max_len=128 + max_tokens, prefix_caching=prefix_caching)
    for number in range(running):
        loop.add(str(number), 64 + number % BLOCK_SIZE, max_tokens)
    windows = []
    for _ in range(repeat + 1):
        windows.append(Times())
        for _ in range(WINDOW):
            loop.step(windows[-1])
    return windows[1:]  # the first window includes prefill


def churn(policy: SchedulingPolicy[Any], repeat: int, *, prefix_caching: bool) -> list[Times]:
    rounds = []
    for _ in range(repeat):
        rounds.append(Times())
        loop = Loop(policy, max_running=256, max_len=1024, prefix_caching=prefix_caching)
        for number in range(1000):
            loop.add(str(number), 512, 256)
        while loop.scheduler.has_work or loop.in_flight:
            loop.step(rounds[-1])
    return rounds


def total_of_minima(repeats: Sequence[Sequence[float]]) -> float:
    """Microseconds of all steps, each at its minimum over the repeats."""
    return 1e6 * sum(min(same) for same in zip(*repeats, strict=True))


def rows_of(name: str, repeats: Sequence[Times]) -> list[Row]:
    """One row per phase and unit; a multi-step step counts once per iteration."""
    rows = []
    for phase in ("schedule", "commit"):
        spent = total_of_minima([getattr(times, phase) for times in repeats])
        rows.append(Row(metric=f"{name}: {phase}", value=spent / repeats[0].iterations, unit="us/step"))
        rows.append(Row(metric=f"{name}: {phase}", value=spent / repeats[0].tokens, unit="us/request/step"))
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs", help="a registered scheduling policy, with its default options")
    parser.add_argument(
        "--repeat", type=int, default=30, help="windows of steady decode; churn repeats a third as often"
    )
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    policy_class = load_plugins().schedulers.get(arguments.policy).load()
    policy = policy_class(policy_class.options_class() if policy_class.options_class else None)
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
            "block_size": BLOCK_SIZE,
            "repeat": arguments.repeat,
        }
        write(arguments.json, report("scheduler", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
