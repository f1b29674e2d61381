"""Runs a load of equal requests so that its steady state begins soon, and finds the window of that state.

The first requests have spread ages: each has a prompt longer, and an output shorter, by the tokens that a request of
its age would have decoded, so that contexts and ends are those of the steady state as soon as these prompts are
computed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from load_bounds import mean_context

from engine.cli.bench.load import Load
from engine.cli.bench.profile import Profile, Step, record_steps
from engine.core.engine import Engine

CACHE_SHARE = 0.98
"""Share of the cache that the requests in flight fill on average; the rest is for uneven ages."""
TOLERANCE = 0.02
"""Maximum error of a window's prompt tokens per output token, as a share."""
MIN_WINDOW = 0.5
"""Minimum length of a window, as a share of the time in which requests follow each other."""
PROFILE_WALL_STEPS = 64
"""Steps before the profiled ones, of which the time of a step without the profiler is the mean."""


@frozen
class Sizes:
    """The lengths of a load's requests, and how many run."""

    inputs: int
    outputs: int
    in_flight: int
    """Requests in the engine at a time."""
    decoding: int
    """Requests that decode at a time in the steady state: less than in flight where the token budget is short."""
    ramp_steps: float
    """Steps until that many requests decode, if each step uses its whole token budget."""


@frozen
class Progress:
    """Counters of a run after a step."""

    seconds: float
    """Since the first request."""
    prompt_tokens: int
    output_tokens: int
    running: int


@frozen(kw_only=True)
class Run:
    """One run of a load."""

    sizes: Sizes
    progress: tuple[Progress, ...]
    window: tuple[int, int] | None
    """Indices of the window's ends in `progress`; None: there was no steady state."""
    preemptions: int
    complete: bool
    """Whether every request ran to its end."""
    profile: Profile | None = None
    """Kernels of steps after the window."""

    @property
    def whole(self) -> float:
        """Output tokens per second of the whole run."""
        last = self.progress[-1]
        return last.output_tokens / last.seconds

    @property
    def window_seconds(self) -> float | None:
        """Length of the window, seconds."""
        if self.window is None:
            return None
        first, last = (self.progress[end] for end in self.window)
        return last.seconds - first.seconds

    @property
    def steady(self) -> float | None:
        """Output tokens per second of the window."""
        if self.window is None or self.window_seconds is None:
            return None
        first, last = (self.progress[end] for end in self.window)
        return (last.output_tokens - first.output_tokens) / self.window_seconds

    @property
    def step_seconds(self) -> float | None:
        """Duration of a mean step of the window."""
        if self.window is None or self.window_seconds is None:
            return None
        return self.window_seconds / (self.window[1] - self.window[0])

    @property
    def mean_running(self) -> float | None:
        """Running requests in a mean step of the window."""
        if self.window is None:
            return None
        inside = self.progress[self.window[0] + 1 : self.window[1] + 1]
        return sum(one.running for one in inside) / len(inside)


def find_sizes(
    inputs: int, outputs: int, *, cache_tokens: float, block_size: int, max_running: int, budget: int
) -> Sizes:
    """How many requests run. cache_tokens: that the cache holds; budget: maximum tokens per step.

    A step of D decoding requests has D / `outputs` new prompts, so that D * (1 + inputs / outputs) is its tokens. Until
    D requests decode, steps compute all their tokens, whether in prompts or decodes: D * (inputs + outputs / 2).
    """
    mean = mean_context(inputs, outputs)
    in_flight = max(1, min(max_running, int(CACHE_SHARE * cache_tokens / (mean + block_size / 2))))
    decoding = max(1, min(in_flight, budget * outputs // (inputs + outputs)))
    return Sizes(inputs, outputs, in_flight, decoding, ramp_steps=decoding * mean / budget)


def spread_ages(sizes: Sizes, budget: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of the first requests, oldest first. budget: maximum tokens per step.

    Once all their prompts are computed, ages are to be spread evenly over the output. A request whose prompt is
    computed before others decodes meanwhile, so it begins younger by that many tokens.
    """
    lengths = []
    step = 0.0
    for number in range(sizes.decoding):
        wanted = sizes.outputs * (1 - (number + 0.5) / sizes.decoding)
        age = min(max(round(wanted - (sizes.ramp_steps - step)), 0), sizes.outputs - 1)
        lengths.append((sizes.inputs + age, sizes.outputs - age))
        step += (sizes.inputs + age) / (budget - number)
    return lengths


def find_window(progress: Sequence[Progress], inputs: int, outputs: int) -> tuple[int, int] | None:
    """Indices of the ends of the longest window that has `inputs` prompt tokens per `outputs` output tokens.

    progress: of the time in which new requests follow those that end. None: no window is as long as MIN_WINDOW.
    """
    if len(progress) < 2:
        return None
    seconds = np.array([one.seconds for one in progress])
    prompts = np.array([one.prompt_tokens for one in progress], dtype=float) * outputs
    generated = np.array([one.output_tokens for one in progress], dtype=float) * inputs
    longest, found = MIN_WINDOW * (seconds[-1] - seconds[0]), None
    for begin in range(len(progress) - 1):
        if seconds[-1] - seconds[begin] < longest:
            break
        new = generated[begin + 1 :] - generated[begin]
        error = np.abs(prompts[begin + 1 :] - prompts[begin] - new)
        balanced = np.flatnonzero((error <= TOLERANCE * new) & (new > 0))
        if len(balanced) and seconds[end := begin + 1 + int(balanced[-1])] - seconds[begin] > longest:
            longest, found = seconds[end] - seconds[begin], (begin, end)
    return found


def run(
    engine: Engine,
    name: str,
    sizes: Sizes,
    *,
    following: int,
    aged: bool,
    seconds: float | None,
    pool: tuple[int, ...],
    profiled: int = 0,
) -> Run:
    """Run a load.

    following: requests of full length. aged: whether they follow `spread_ages`. seconds: from the moment that the
    batch is full to the end of the window; None: until the last token. profiled: steps to profile after the window.
    """
    first = spread_ages(sizes, engine.config.scheduler.max_batch_tokens) if aged else []
    load = Load(name=name, lengths=(*first, *[(sizes.inputs, sizes.outputs)] * following))
    ramp = sum(inputs for inputs, _ in load.lengths[: sizes.decoding])
    source = load.requests(engine.vocab_size, f"{name} ", prompts=slices(pool, load))
    in_engine: set[str] = set()
    progress: list[Progress] = []
    full = None
    exhausted = None
    before = engine.stats()
    begin = time.perf_counter()

    def fill() -> bool:
        """Add requests until as many as wanted are in the engine; whether the load has more."""
        while len(in_engine) < sizes.in_flight:
            request = next(source, None)
            if request is None:
                return False
            engine.add(request)
            in_engine.add(request.id)
        return True

    def advance(step: Step) -> None:
        in_engine.difference_update(one.request for one in step() if one.finish_reason is not None)

    while True:
        if exhausted is None and not fill():
            exhausted = len(progress)
        if not engine.has_work:
            break
        advance(engine.step)
        stats = engine.stats()
        now = Progress(
            seconds=time.perf_counter() - begin,
            prompt_tokens=stats.prompt_tokens - before.prompt_tokens,
            output_tokens=stats.generation_tokens - before.generation_tokens,
            running=stats.running,
        )
        progress.append(now)
        if full is None and now.prompt_tokens >= ramp:
            full = len(progress) - 1
        if seconds is not None and full is not None and now.seconds - progress[full].seconds >= seconds:
            break
    complete = not in_engine
    profile = None
    if profiled and not complete:
        recent = progress[-min(len(progress), PROFILE_WALL_STEPS) :]

        def work(step: Step) -> int:
            for _ in range(profiled):
                fill()
                advance(step)
            return profiled

        steps, host, ran = record_steps(engine, work)
        wall = (recent[-1].seconds - recent[0].seconds) / max(len(recent) - 1, 1) * 1e6
        profile = Profile(title=name, steps=steps, wall=wall, host=host, ran=ran)
    for request_id in in_engine:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    window = None
    if full is not None:
        window = find_window(progress[full:exhausted], sizes.inputs, sizes.outputs)
    return Run(
        sizes=sizes,
        progress=tuple(progress),
        window=None if window is None or full is None else (full + window[0], full + window[1]),
        preemptions=stats.preemptions - before.preemptions,
        complete=complete,
        profile=profile,
    )


def slices(pool: tuple[int, ...], load: Load) -> list[tuple[int, ...]]:
    """The prompts of a load, each from a random place of `pool`."""
    draw = random.Random(load.name)
    starts = [draw.randrange(len(pool) - inputs + 1) for inputs, _ in load.lengths]
    return [pool[start : start + inputs] for start, (inputs, _) in zip(starts, load.lengths, strict=True)]


def cache_tokens(engine: Engine) -> float:
    """Tokens that the cache of keys and values holds, of contexts of the maximum length."""
    info = engine.cache_info
    return info.num_blocks * engine.max_len / info.blocks_per_context
