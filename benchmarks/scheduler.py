"""Measures the host time of planning and committing steps; a fake runner returns results immediately.

    python benchmarks/scheduler.py [--policy fcfs] [--json benchmarks/results/scheduler.json]

One step is in flight while the next is planned, as in the engine. Steady: all sequences decode, and their block
boundaries are spread over the steps. Churn: 1000 requests that arrive together, 512 tokens in and 256 out, of which 256
run. The same steps are timed many times, and the minimum of each step counts, since other load only adds time.

Waiting: an urgent request under `priority` that does not fit, half of the running ones being less urgent; a long prompt
under `fcfs` that is cached but does not fit; and aborts of waiting requests, newest first. Here the processor time of
this thread counts, and each step runs once. Equal prompts: tokens computed and blocks held.

--drafts K: steady decode where each sequence has K drafts in each step, of which half, rounded up, are accepted,
proposed by a speculator on the host or on the device, and chosen by DraftLengths ("auto") or not. No step is then in
flight while the next is planned. The speculator's own time is that of returning a list. "learn" is what DraftLengths
does while the device works.
"""

from __future__ import annotations

import argparse
import itertools
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
from engine.core.profiling import ModelCost, ModuleCost, Peaks, StepMeter
from engine.core.schedulers import BlockManager, CacheMetrics, Scheduler, SchedulingPolicy
from engine.core.speculators import (
    CheckedSpeculator,
    DeviceProposals,
    DraftLengths,
    SpeculatedSequence,
    Speculator,
    SpeculatorSpec,
    StepCosts,
)
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
    learn: list[float] = Factory(list)
    iterations: int = 0
    tokens: int = 0


class Loop:
    """Runs a scheduler as Engine.step does."""

    def __init__(
        self,
        policy: SchedulingPolicy[Any],
        *,
        max_running: int,
        max_len: int,
        prefix_caching: bool,
        blocks: int | None = None,
        kv_metrics: float | None = None,
        roofline: bool = False,
        drafts: int = 0,
        on_device: bool = False,
        auto: bool = False,
    ) -> None:
        """kv_metrics: share of blocks that are sampled; None: the cache is not measured. roofline: count FLOPs and
        bytes. drafts: of each sequence in each step. on_device: a speculator on the device proposes them. auto:
        DraftLengths chooses them; it chooses all."""
        self.lengths = DraftLengths(StepCosts([(1, 1.0), (2, 1.0)]), drafts) if auto else None
        self.meter = make_meter() if roofline else None
        blocks = blocks or 2 * max_running * max_len // BLOCK_SIZE
        metrics = CacheMetrics(sample=kv_metrics) if kv_metrics is not None else None
        self.scheduler = Scheduler(
            policy,
            BlockManager(blocks, BLOCK_SIZE, prefix_caching=prefix_caching, observer=metrics),
            max_batch_tokens=8192,
            max_running=max_running,
            max_len=max_len,
            eos_tokens=frozenset({0}),
            cache_metrics=metrics,
            meter=self.meter,
            speculator=constant_speculator(drafts, max_len, on_device) if drafts else None,
            draft_lengths=self.lengths,
        )
        self.in_flight: deque[tuple[Step, StepResult]] = deque()

    def add(self, name: str, prompt_len: int, max_tokens: int, *, priority: int = 0, seed: str | None = None) -> None:
        """Add a request of a random prompt. seed: of the prompt; None: its own."""
        prompt = tuple(random.Random(seed or name).choices(range(1, 1000), k=prompt_len))
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        self.scheduler.add(Request(id=name, prompt=prompt, params=params, priority=priority))

    def step(self, times: Times) -> None:
        """Plan a step, and commit the previous one."""
        if self.in_flight and self.scheduler.needs_result():
            self.commit(times)
        begin = time.perf_counter()
        step = self.scheduler.schedule(begin)
        times.schedule.append(time.perf_counter() - begin)
        if self.lengths is not None and step is not None and step.drafts:
            begin = time.perf_counter()
            self.lengths.observe(step.decode_rows, 1.0, drafts=True)
            self.lengths.prepare()
            times.learn.append(time.perf_counter() - begin)
        if step is not None:
            self.in_flight.append((step, answer(step)))
            times.iterations += step.iterations
        if step is None or len(self.in_flight) > 1:
            self.commit(times)

    def commit(self, times: Times) -> None:
        """Commit the oldest step in flight."""
        earlier, result = self.in_flight.popleft()
        begin = time.perf_counter()
        if self.meter is not None:
            self.meter.finish()
        self.scheduler.commit(earlier, result, begin)
        times.commit.append(time.perf_counter() - begin)
        times.tokens += len(result.tokens) * len(result.tokens[0]) + sum(map(len, result.verified))


def answer(step: Step) -> StepResult:
    """A result with one token per sequence that samples, and half of the drafts, rounded up. No token ends a
    request."""
    row = (7,) * (len(step.decodes) + sum(chunk.sample for chunk in step.chunks))
    verified = tuple((*part.tokens[1 : len(part.tokens) // 2 + 1], 7) for part in step.drafts)
    proposals = ((7,) * step.propose,) * (len(row) + len(step.drafts)) if step.propose else ()
    return StepResult(step=step.id, tokens=(row,) * step.iterations, verified=verified, proposals=proposals)


class Constant(Speculator[None]):
    """Proposes `limit` tokens, always the same one."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> list[int]:
        return [7] * limit


def constant_speculator(drafts: int, max_len: int, on_device: bool) -> CheckedSpeculator | DeviceProposals:
    spec = SpeculatorSpec(vocab_size=1000, max_len=max_len, max_drafts=drafts)
    return DeviceProposals(spec) if on_device else CheckedSpeculator(Constant(spec), spec)


def make_meter() -> StepMeter:
    """A meter of a model with experts and a window, on a device with known peaks."""
    modules = (
        ModuleCost(name="linear", kind="linear", weight_bytes=10**9, flops_per_row=1e9),
        ModuleCost(name="experts", kind="experts", num_experts=128, top_k=8, expert_bytes=10**9, flops_per_row=1e9),
        ModuleCost(name="head", kind="lm_head", rows="sampled", weight_bytes=10**8, flops_per_row=1e8),
        ModuleCost(name="full", kind="attention", flops_per_pair=10**4, kv_bytes_per_token=1000),
        ModuleCost(name="window", kind="attention", window=1024, flops_per_pair=10**4, kv_bytes_per_token=1000),
    )
    return StepMeter(ModelCost(modules=modules), Peaks(bandwidth=1e12, flops=1e15))


def steady(policy: SchedulingPolicy[Any], running: int, repeat: int, **settings: Any) -> list[Times]:
    max_tokens = (repeat + 3) * WINDOW * max(MAX_STEPS, 1 + settings.get("drafts", 0))
    loop = Loop(policy, max_running=running, max_len=128 + max_tokens, **settings)
    for number in range(running):
        loop.add(str(number), 64 + number % BLOCK_SIZE, max_tokens)
    windows = []
    for _ in range(repeat + 1):
        windows.append(Times())
        for _ in range(WINDOW):
            loop.step(windows[-1])
    return windows[1:]  # the first window includes prefill


def churn(policy: SchedulingPolicy[Any], repeat: int, **settings: Any) -> list[Times]:
    rounds = []
    for _ in range(repeat):
        rounds.append(Times())
        loop = Loop(policy, max_running=256, max_len=1024, **settings)
        for number in range(1000):
            loop.add(str(number), 512, 256)
        while loop.scheduler.has_work or loop.in_flight:
            loop.step(rounds[-1])
    return rounds


def run_all(loop: Loop) -> None:
    """Run steps until no request waits and no step is in flight."""
    while loop.scheduler.stats().waiting:
        loop.step(Times())
    while loop.in_flight:
        loop.scheduler.commit(*loop.in_flight.popleft(), 0.0)


def waiting_steps(loop: Loop, count: int) -> tuple[float, float]:
    """Microseconds of planning, median and maximum of `count` steps in which a request waits."""
    seconds = []
    for _ in range(count):
        begin = time.thread_time()
        step = loop.scheduler.schedule(begin)
        seconds.append(time.thread_time() - begin)
        assert step is not None
        loop.scheduler.commit(step, answer(step), begin)
    assert loop.scheduler.stats().waiting, "the request fits, so that nothing is measured"
    return 1e6 * sorted(seconds)[count // 2], 1e6 * max(seconds)


def urgent(running: int) -> tuple[float, float]:
    """Planning with an urgent request that would fit only if requests as urgent were preempted."""
    loop = Loop(
        policy_of("priority"), max_running=running + 1, max_len=640 * running, prefix_caching=True, blocks=40 * running
    )
    for number in range(running):
        loop.add(str(number), 512, 400, priority=number % 2)
    run_all(loop)
    loop.add("urgent", 32 * BLOCK_SIZE * running - 1, 8, priority=0)
    return waiting_steps(loop, 100)


def blocked(prompt_len: int) -> tuple[float, float]:
    """Planning with a cached prompt at the head of the queue that does not fit."""
    blocks = prompt_len // BLOCK_SIZE + 300
    loop = Loop(policy_of("fcfs"), max_running=256, max_len=prompt_len + 1024, prefix_caching=True, blocks=blocks)
    loop.add("long", prompt_len, 1)
    while loop.scheduler.has_work:
        loop.step(Times())
    for number in range(16):
        loop.add(str(number), 500, 400)
    run_all(loop)
    loop.add("long", prompt_len, 1)
    return waiting_steps(loop, 100)


def aborts(count: int) -> float:
    """Microseconds per abort of a waiting request, newest first."""
    loop = Loop(policy_of("fcfs"), max_running=1, max_len=64, prefix_caching=True)
    for number in range(count):
        loop.add(str(number), 8, 8)
    begin = time.thread_time()
    for number in reversed(range(count)):
        loop.scheduler.abort(str(number))
    return 1e6 * (time.thread_time() - begin) / count


def equal_prompts(count: int, prompt_len: int) -> tuple[int, int]:
    """Tokens computed in prefills, and blocks held at most, for equal prompts that arrive together."""
    loop = Loop(policy_of("fcfs"), max_running=256, max_len=prompt_len + 16, prefix_caching=True)
    for number in range(count):
        loop.add(str(number), prompt_len, 4, seed="equal")
    computed = held = 0
    while loop.scheduler.has_work:
        step = loop.scheduler.schedule(0.0)
        assert step is not None
        computed += sum(chunk.count for chunk in step.chunks)
        held = max(held, loop.scheduler.stats().blocks_used)
        loop.scheduler.commit(step, answer(step), 0.0)
    return computed, held


def policy_of(name: str) -> SchedulingPolicy[Any]:
    """A registered policy with its default options."""
    policy_class = load_plugins().schedulers.get(name).load()
    made: SchedulingPolicy[Any] = policy_class(policy_class.options_class() if policy_class.options_class else None)
    return made


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


def throughput_rows(policy: SchedulingPolicy[Any], repeat: int, **settings: Any) -> list[Row]:
    """Rows of steady decode and of churn. settings: of Loop."""
    rows = []
    for running in (1, 64, 256):
        rows += rows_of(f"decode, {running} running", steady(policy, running, repeat, **settings))
    rounds = churn(policy, max(1, repeat // 3), **settings)
    return rows + rows_of("1000 requests, 512 in / 256 out", rounds)


def drafts_rows(policy: SchedulingPolicy[Any], repeat: int, drafts: int, **settings: Any) -> list[Row]:
    """Rows of steady decode with drafts. settings: of Loop."""
    rows = []
    for on_device, auto in itertools.product((False, True), repeat=2):
        name = f"{drafts} drafts, {'device' if on_device else 'host'}{', auto' if auto else ''}"
        for running in (1, 32, 256):
            windows = steady(policy, running, repeat, drafts=drafts, on_device=on_device, auto=auto, **settings)
            for phase in ("schedule", "commit", *(("learn",) if auto else ())):
                spent = total_of_minima([getattr(times, phase) for times in windows]) / WINDOW
                metric = f"{name}, {running} running: {phase}"
                rows.append(Row(metric=metric, value=spent, unit="us/step"))
                rows.append(Row(metric=metric, value=spent / running, unit="us/request/step"))
    return rows


def waiting_rows() -> list[Row]:
    """Rows of requests that wait, and of equal prompts."""
    cases: list[tuple[str, tuple[float, float]]] = [
        (f"urgent request that does not fit, {running} running", urgent(running)) for running in (256, 1024)
    ]
    cases.append(("blocked prompt of 1M tokens, cached", blocked(1_000_000)))
    rows = []
    for name, (median, most) in cases:
        rows.append(Row(metric=f"{name}: schedule, median", value=median, unit="us/step"))
        rows.append(Row(metric=f"{name}: schedule, maximum", value=most, unit="us/step"))
    rows.append(Row(metric="abort of 10,000 waiting, newest first", value=aborts(10_000), unit="us/abort"))
    for count, prompt_len in ((8, 509), (64, 509), (64, 20_000)):
        computed, held = equal_prompts(count, prompt_len)
        name = f"{count} equal prompts of {prompt_len:,} tokens"
        rows.append(Row(metric=f"{name}: computed", value=computed, unit="tokens"))
        rows.append(Row(metric=f"{name}: held", value=held, unit="blocks"))
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs", help="a registered scheduling policy, with its default options")
    parser.add_argument(
        "--repeat", type=int, default=30, help="windows of steady decode; churn repeats a third as often"
    )
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kv-metrics", type=float, metavar="SAMPLE", help="measure the cache: share of blocks sampled")
    parser.add_argument("--roofline", action="store_true", help="count FLOPs and bytes of each step, as engines do")
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="steady decode with K drafts per sequence")
    parser.add_argument("--waiting-only", action="store_true", help="only requests that wait, and equal prompts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    policy = policy_of(arguments.policy)
    caching = arguments.prefix_caching
    cache = {"prefix_caching": caching, "kv_metrics": arguments.kv_metrics, "roofline": arguments.roofline}
    if arguments.drafts:
        rows = drafts_rows(policy, arguments.repeat, arguments.drafts, **cache)
    else:
        rows = [] if arguments.waiting_only else throughput_rows(policy, arguments.repeat, **cache)
    if rows:
        print(f"{'':<45}{'us/step':>10}{'us/request/step':>18}")
    for step, request in zip(rows[::2], rows[1::2], strict=True):
        print(f"{step.metric:<45}{step.value:>10.1f}{request.value:>18.3f}")
    extra = [] if arguments.drafts else waiting_rows()
    print()
    for row in extra:
        print(f"{row.metric:<65}{row.value:>12,.1f} {row.unit}")
    if arguments.json is not None:
        rows += extra
        settings = {
            "policy": arguments.policy,
            **cache,
            "drafts": arguments.drafts,
            "block_size": BLOCK_SIZE,
            "repeat": arguments.repeat,
        }
        write(arguments.json, report("scheduler", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
