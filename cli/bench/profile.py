"""Where a step's time goes on the device: kernels by name, and the time in which none runs, by torch.profiler.

The profiler slows down the host but not the kernels, so the time of a step is measured without the profiler, in the
steps just before. On a CPU, PyTorch's operators take the place of kernels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from attrs import field, frozen

from engine.cli.bench.load import Load, abandon, say
from engine.cli.bench.report import Row
from engine.cli.tables import print_table
from engine.core.errors import ConfigError, ExecutorError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.types import Output, Request

MARK = "engine step"
"""Name of the annotation around each step, which relates the profiler's clock to ours."""
SETTLE = 4
"""Decode steps before the profiled ones."""
SLACK = 32
"""Spare output tokens, so that no sequence finishes even if a step yields several tokens."""
GAP = 5.0
"""us: a longer idle time is caused by the host; a shorter one separates kernels of one launch."""
TOP = 25
TRACE_STEPS = 10

Span = tuple[float, float]
Step = Callable[[], "list[Output]"]


@frozen
class Ran:
    """One run of a kernel, or on a CPU of an operator. Times in us since the start of the first step."""

    name: str
    lane: int
    """Stream or thread."""
    begin: float
    end: float
    own: float
    """us of its own: of a kernel, without the time in which another kernel that ends earlier runs; of an operator,
    without the operators called within."""


@frozen
class HostStep:
    """One call of Engine.step, in us since the start of the first."""

    begin: float
    end: float
    phases: tuple[tuple[str, float], ...]
    """(phase, us)."""


@frozen(kw_only=True)
class Profile:
    """Profile of several steps of one kind."""

    title: str
    steps: float
    """Number of decode steps per sequence or, for a prefill, of engine steps."""
    wall: float
    """us per step, without the profiler."""
    host: tuple[HostStep, ...]
    ran: tuple[Ran, ...] = field(repr=False)

    @property
    def busy(self) -> float:
        """us per step in which at least one kernel runs; kernels may overlap."""
        return sum(end - begin for begin, end in merged((one.begin, one.end) for one in self.ran)) / self.steps

    @property
    def profiled(self) -> float:
        """us per step from the first kernel to the last, under the profiler."""
        return (max(one.end for one in self.ran) - min(one.begin for one in self.ran)) / self.steps

    @property
    def idle(self) -> float:
        """us per step in which no kernel runs, without the profiler."""
        return self.wall - self.busy

    def gaps(self) -> tuple[float, float]:
        """us per step without a kernel, under the profiler: (in gaps of at least `GAP`, in shorter gaps)."""
        spans = merged((one.begin, one.end) for one in self.ran)
        lengths = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
        long = sum(length for length in lengths if length >= GAP)
        return long / self.steps, (sum(lengths) - long) / self.steps

    def kernels(self) -> list[tuple[str, float, float]]:
        """(name, calls per step, us per step), the most expensive first."""
        spent: dict[str, tuple[int, float]] = {}
        for one in self.ran:
            calls, own = spent.get(one.name, (0, 0.0))
            spent[one.name] = calls + 1, own + one.own
        rows = [(name, calls / self.steps, own / self.steps) for name, (calls, own) in spent.items()]
        return sorted(rows, key=lambda row: -row[2])

    def timeline(self) -> dict[str, Any]:
        """Host phases and kernels of a few steps in the middle, as plain data; times in us from the first of them."""
        first = max((len(self.host) - TRACE_STEPS) // 2, 0)
        steps = self.host[first : first + TRACE_STEPS]
        zero, last = steps[0].begin, steps[-1].end
        return {
            "title": self.title,
            "wall_us": self.wall,
            "busy_us": self.busy,
            "steps": [
                {"begin": step.begin - zero, "end": step.end - zero, "phases": [list(one) for one in step.phases]}
                for step in steps
            ],
            "kernels": [
                [one.name, one.lane, one.begin - zero, one.end - zero]
                for one in self.ran
                if one.end > zero and one.begin < last
            ],
        }


def merged(spans: Iterator[Span]) -> list[Span]:
    """The union of time spans, as spans that do not touch."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def check(engine: Engine) -> None:
    """Raise ConfigError for an executor that launches kernels in another process."""
    [executor] = [choice.name for choice in engine.parts.choices if choice.extension_point == "executors"]
    if executor != "uniproc":
        raise ConfigError(f"--profile records only this process, and executor {executor} may use others; use uniproc")


def profile_decode(engine: Engine, batch: int, inputs: int, steps: int) -> Profile:
    """Profile at least `steps` decode steps of `batch` sequences. Raises ExecutorError if the profiler saw nothing."""
    load = Load(name="", lengths=((inputs, decoded(engine, batch, inputs, steps)),) * batch)
    requests = list(load.requests(engine.vocab_size, f"profile {batch}-"))
    return profile_requests(engine, f"decode, batch {batch}", requests, steps)


def decoded(engine: Engine, batch: int, inputs: int, steps: int) -> int:
    """Output tokens of `batch` requests with prompts of `inputs` tokens, which decode while `steps` are profiled."""
    budget = engine.config.scheduler.max_batch_tokens
    chunks = -(-batch * inputs // max(budget - batch, 1))  # steps in which the first sequences already decode
    return 1 + chunks + 2 * (steps + SETTLE) + SLACK


def profile_requests(engine: Engine, title: str, requests: Sequence[Request], steps: int) -> Profile:
    """Profile at least `steps` decode steps of requests, and abort them. Raises ExecutorError if the profiler saw
    nothing."""
    batch, names = len(requests), [request.id for request in requests]
    for request in requests:
        engine.add(request)

    made = dict.fromkeys(names, 0)
    while min(made.values()) < SETTLE:
        for output in engine.step():
            made[output.request] += len(output.tokens)

    def decode(step: Step) -> int:
        tokens = 0
        while tokens < steps * batch and engine.has_work:
            tokens += sum(len(output.tokens) for output in step())
        return tokens

    begin = time.perf_counter()
    tokens = decode(engine.step)
    wall = (time.perf_counter() - begin) / tokens * batch * 1e6
    tokens, host, ran = record_steps(engine, decode)
    abandon(engine, names)
    say(f"profiled {title}")
    return Profile(title=title, steps=tokens / batch, wall=wall, host=host, ran=ran)


def profile_prefill(engine: Engine, count: int, length: int) -> Profile:
    """Profile the steps that compute `count` prompts of `length` tokens. Raises ExecutorError."""
    load = Load(name="", lengths=((length, 1),) * count)

    def prefill(step: Step) -> int:
        before = engine.stats().steps
        while engine.has_work:
            step()
        return engine.stats().steps - before

    for request in load.requests(engine.vocab_size, "profile prefill-"):
        engine.add(request)
    begin = time.perf_counter()
    steps = prefill(engine.step)
    wall = (time.perf_counter() - begin) / steps * 1e6
    for request in load.requests(engine.vocab_size, "profile prefill again-"):
        engine.add(request)
    steps, host, ran = record_steps(engine, prefill)
    say(f"profiled prefill {count} x {length}")
    return Profile(title=f"prefill, {count} x {length}", steps=steps, wall=wall, host=host, ran=ran)


def record_steps(engine: Engine, work: Callable[[Step], int]) -> tuple[int, tuple[HostStep, ...], tuple[Ran, ...]]:
    """Run `work` with a recorded step, under the profiler; returns its result, and the steps and kernels recorded.

    Raises ExecutorError if the profiler saw nothing.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from engine.core.step_loop import STEP_PHASES

    gpu = engine.device.type != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]

    def settle() -> None:
        if gpu:
            torch.cuda.synchronize(engine.device.torch_name)

    settle()
    with profile(activities=activities):  # the first use sets up the tracing of the device, which takes long
        torch.ones(1, device=engine.device.torch_name).add_(1)
        settle()

    phases: list[tuple[tuple[str, float], ...]] = []

    def marked() -> list[Output]:
        before = dict(engine.stats().seconds)
        with record_function(MARK):
            outputs = engine.step()
        after = dict(engine.stats().seconds)
        phases.append(tuple((phase, (after[phase] - before[phase]) * 1e6) for phase in STEP_PHASES))
        return outputs

    with profile(activities=activities) as recorded:
        result = work(marked)
        settle()
    host, ran = _read(recorded.events() or [], phases, gpu=gpu)
    if not ran:
        raise ExecutorError(
            "the profiler saw no kernel of these steps; is another profiler attached to the device, or does torch lack"
            " its tracing (CUPTI)?"
        )
    return result, host, ran


def _read(
    events: Sequence[Any], phases: Sequence[tuple[tuple[str, float], ...]], *, gpu: bool
) -> tuple[tuple[HostStep, ...], tuple[Ran, ...]]:
    """Convert torch's FunctionEvents, whose times are in us, to steps and kernels."""
    marks = sorted(
        {
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.name == MARK and event.device_type.name == "CPU"
        }
    )
    zero = marks[0][0] if marks else 0.0
    host = tuple(HostStep(begin - zero, end - zero, spent) for (begin, end), spent in zip(marks, phases, strict=True))
    chosen = [
        event
        for event in events
        if (event.device_type.name != "CPU") == gpu and not event.is_user_annotation and event.name != MARK
    ]
    own = _own_times(chosen) if gpu else [event.self_cpu_time_total for event in chosen]
    ran = tuple(
        Ran(event.name, event.device_resource_id, event.time_range.start - zero, event.time_range.end - zero, spent)
        for event, spent in zip(chosen, own, strict=True)
    )
    return host, ran


def _own_times(kernels: Sequence[Any]) -> list[float]:
    """Own us of each kernel: a moment in which several kernels run belongs to the one that ends first.

    A kernel may be set up, and wait, while those run that end before it. Together the own times are the busy time.
    """
    own = [0.0] * len(kernels)
    taken: list[Span] = []  # the moments of the kernels so far, as spans that do not overlap, in order
    for number in sorted(range(len(kernels)), key=lambda one: kernels[one].time_range.end):
        span = kernels[number].time_range
        begin, own[number] = span.start, span.end - span.start
        while taken and taken[-1][1] > span.start:
            start, end = taken.pop()
            own[number] -= end - max(start, span.start)
            begin = min(begin, start)
        taken.append((begin, span.end))
    return own


def rows_of(profile: Profile) -> Iterator[Row]:
    """The figures of a profile and its most expensive kernels, as rows of a report."""
    long, short = profile.gaps()
    for metric, value in (
        ("device busy", profile.busy),
        ("step", profile.wall),
        ("device idle", profile.idle),
        ("step under the profiler", profile.profiled),
        (f"idle in gaps from {GAP:g} us, under the profiler", long),
        (f"idle in gaps below {GAP:g} us, under the profiler", short),
        *((f"kernel {name}", spent) for name, _, spent in profile.kernels()[:TOP]),
    ):
        yield Row(metric=metric, case=f"profile: {profile.title}", value=value, unit="us")


def print_profile(profile: Profile) -> None:
    """Print the most expensive kernels and the total time of a step."""
    kernels = profile.kernels()
    total = sum(spent for _, _, spent in kernels)
    rest = kernels[TOP:]
    rows = [(name, f"{calls:.2f}", f"{spent:.2f}", f"{spent / total:.1%}") for name, calls, spent in kernels[:TOP]]
    if rest:
        spent = sum(one for _, _, one in rest)
        rows.append(
            (f"{len(rest)} others", f"{sum(calls for _, calls, _ in rest):.2f}", f"{spent:.2f}", f"{spent / total:.1%}")
        )
    print_table(
        ("kernel", "calls per step", "us per step", "of all"),
        [(_short(name), *others) for name, *others in rows],
        title=f"{profile.title}: kernels, {profile.steps:g} steps",
    )
    long, short = profile.gaps()
    typer.echo(
        f"us per step: {profile.wall:.1f} wall, {profile.busy:.1f} device busy, {profile.idle:.1f} idle\n"
        f"under the profiler: {profile.profiled:.1f} wall, idle {long:.1f} in gaps from {GAP:g} us and {short:.1f} in"
        " shorter ones\n"
    )


def _short(name: str) -> str:
    """A kernel's name without most of its template arguments."""
    return name if len(name) <= 110 else f"{name[:70]} ... {name[-35:]}"
