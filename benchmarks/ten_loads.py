"""Output tokens per second under the ten loads that TensorRT-LLM publishes, next to what the device allows.

    python benchmarks/ten_loads.py --seconds 15 [--loads 128/128,1000/1000] [--json FILE]

Random weights and prompts, greedy, ignore_eos, no prefix cache; Llama-3.1-8B in fp8 with a float8 cache unless said. A
load is IN/OUT: prompt and output tokens of each of its requests. One engine runs all loads; each load keeps as many
requests in flight as the cache holds at their mean context, at most --max-running, and adds one when one ends.

By default a load is as published: all its requests wait at the start, and the last token ends it, which takes 50
minutes for all ten at the published rates. --seconds and --requests are shorter. The first requests are then of spread
ages: each has a prompt longer, and an output shorter, by the tokens that a request of its age would have decoded, so
that contexts and ends are those of the steady state as soon as the prompts of the first requests are computed.

The steady rate counts the output tokens of a window in which the batch is full, new requests follow those that end and,
within 2 %, as many prompt tokens are computed per output token as the load has. The rate of the whole load counts all
tokens and all the time, also until the batch is full and until it is empty again; with --seconds, which drops what is
left at the end of the window, until then.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen
from load_bounds import BEST, EFFICIENT, Bound, Rates, find_bound, mean_context, steady_batch, token_cost
from models import MODELS, write_model

from engine.cli.bench.load import Load, opened, random_tokens, say
from engine.cli.bench.profile import Profile, Step, print_profile, record_steps, rows_of
from engine.cli.bench.report import Row, engine_settings, percent, report, write
from engine.cli.bench.roofline import Roofline, measured_roofline
from engine.cli.tables import print_table
from engine.core.config import load_config
from engine.core.engine import Engine


@frozen
class Published:
    """A load of NVIDIA's table: TensorRT-LLM 1.0, Llama-3.1-8B in fp8 with a float8 cache on one H200."""

    requests: int
    rate: int
    """Output tokens per second."""
    goal: int
    """The rate that this engine should reach."""


PUBLISHED = {
    "128/128": Published(30_000, 27_911, 31_000),
    "128/2048": Published(3_000, 26_221, 29_000),
    "128/4096": Published(1_500, 18_027, 20_000),
    "500/2000": Published(3_000, 20_770, 23_000),
    "1000/1000": Published(3_000, 17_744, 19_500),
    "1000/2000": Published(1_500, 16_828, 18_500),
    "2048/128": Published(3_000, 3_538, 4_000),
    "2048/2048": Published(1_500, 12_194, 13_500),
    "5000/500": Published(1_500, 3_902, 4_300),
    "20000/2000": Published(1_000, 1_804, 2_000),
}
"""IN/OUT -> what is published of it: docs/source/performance/perf-overview.md of TensorRT-LLM."""
MODEL = "llama-3.1-8b"
"""The model that the published rates and the goals are for."""
QUANT = "fp8"
KV_DTYPE = "float8_e4m3fn"
REQUESTS = 1_500
"""Requests of a load that is not published."""
MAX_RUNNING = 2048
"""Maximum sequences per step, of all loads. More than the cache holds of nine of them; 128/128 could have 4,096, but
reading the weights is no limit from 174 rows on, and each further size costs a CUDA graph at start-up."""
MEMORY_FRACTION = 0.92
"""Share of the free memory for weights, activations and cache, unless --set says otherwise."""
CACHE_SHARE = 0.98
"""Share of the cache that the requests in flight fill on average; the rest is for uneven ages."""
TOLERANCE = 0.02
"""Maximum error of a window's prompt tokens per output token, as a share."""
MIN_WINDOW = 0.5
"""Minimum length of a window, as a share of the time in which requests follow each other."""
PROFILE_WALL_STEPS = 64
"""Steps before the profiled ones, of which the time of a step without the profiler is the mean."""
POOL = 2**18
"""Random tokens of which all prompts are slices: drawing each prompt would take seconds in which the device waits."""
STEADY = "output tokens a second, steady state"
WHOLE = "output tokens a second, whole load"
SERIAL = f"bound, one after the other, attention at {100 * EFFICIENT:.0f} % of bandwidth"
SERIAL_BEST = f"bound, one after the other, attention at {100 * BEST:.0f} % of bandwidth"
OVERLAP = "bound, prompts next to attention"
CUT = "output tokens a second, from the first request to the end of the window"


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
class Result:
    """One run of a load."""

    name: str
    sizes: Sizes
    progress: tuple[Progress, ...]
    window: tuple[int, int] | None
    """Indices of the window's ends in `progress`; None: there was no steady state."""
    preemptions: int
    complete: bool
    """Whether every request ran to its end."""
    bound: Bound | None = None
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

    def share(self, rate: float | None) -> float | None:
        """A rate's share of the serial bound."""
        return None if rate is None or self.bound is None else rate / self.bound.serial

    def rows(self, published: Published | None) -> Iterator[Row]:
        """The figures as rows of a report."""
        baseline, baseline_name = (published.rate, "TensorRT-LLM, published") if published else (None, None)
        rates = ((STEADY, self.steady), (WHOLE if self.complete else CUT, self.whole))
        for metric, rate in rates:
            if rate is not None:
                yield Row(
                    metric=metric,
                    case=self.name,
                    value=rate,
                    unit="tokens/s",
                    baseline=baseline,
                    baseline_name=baseline_name,
                    share=self.share(rate),
                )
        limits: list[tuple[str, float]] = [("goal", published.goal)] if published else []
        if self.bound is not None:
            limits += [
                (SERIAL, self.bound.serial),
                (SERIAL_BEST, self.bound.serial_best),
                (OVERLAP, self.bound.overlap),
            ]
        for metric, rate in limits:
            yield Row(metric=metric, case=self.name, value=rate, unit="tokens/s")
        if self.window is not None and self.window_seconds is not None:
            begin, end = self.window
            inside = self.progress[begin + 1 : end + 1]
            running = sum(one.running for one in inside) / len(inside)
            yield Row(metric="window", case=self.name, value=self.window_seconds, unit="s")
            yield Row(metric="mean step", case=self.name, value=1e3 * self.window_seconds / len(inside), unit="ms")
            yield Row(metric="running in a mean step", case=self.name, value=running, unit="requests")
        yield Row(metric="whole run", case=self.name, value=self.progress[-1].seconds, unit="s")
        yield Row(metric="preemptions", case=self.name, value=self.preemptions, unit="count")
        if self.profile is not None:
            yield from rows_of(self.profile)


def parse_case(name: str) -> tuple[int, int]:
    """The prompt and output tokens of IN/OUT. Raises ValueError."""
    inputs, outputs = (int(length) for length in name.split("/"))
    if inputs < 1 or outputs < 2:
        raise ValueError(f"{name!r} needs a prompt and two output tokens at least")
    return inputs, outputs


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
) -> Result:
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
    result = Result(
        name=name,
        sizes=sizes,
        progress=tuple(progress),
        window=None if window is None or full is None else (full + window[0], full + window[1]),
        preemptions=stats.preemptions - before.preemptions,
        complete=complete,
        profile=profile,
    )
    say(f"{name}: {show(result.steady)} output tokens/s in the window, {show(result.whole)} in all")
    return result


def slices(pool: tuple[int, ...], load: Load) -> list[tuple[int, ...]]:
    """The prompts of a load, each from a random place of `pool`."""
    draw = random.Random(load.name)
    starts = [draw.randrange(len(pool) - inputs + 1) for inputs, _ in load.lengths]
    return [pool[start : start + inputs] for start, (inputs, _) in zip(starts, load.lengths, strict=True)]


def cache_tokens(engine: Engine) -> float:
    """Tokens that the cache of keys and values holds, of contexts of the maximum length."""
    info = engine.cache_info
    return info.num_blocks * engine.max_len / info.blocks_per_context


def measure(engine: Engine, names: Sequence[str], arguments: argparse.Namespace) -> Iterator[Result]:
    """Run the loads, one after another."""
    longest = max(sum(parse_case(name)) for name in names)
    most = engine.config.scheduler.max_running
    pool = random_tokens(random.Random(0), POOL + longest, engine.vocab_size)
    for name in names:
        inputs, outputs = parse_case(name)
        sizes = find_sizes(
            inputs,
            outputs,
            cache_tokens=cache_tokens(engine),
            block_size=engine.cache_info.block_size,
            max_running=min(arguments.in_flight or most, most),
            budget=engine.config.scheduler.max_batch_tokens,
        )
        published = PUBLISHED[name].requests if name in PUBLISHED else REQUESTS
        aged = arguments.seconds is not None or arguments.requests is not None
        following = arguments.requests or published
        yield run(
            engine,
            name,
            sizes,
            following=following,
            aged=aged,
            seconds=arguments.seconds,
            pool=pool,
            profiled=arguments.profile,
        )


def with_bound(result: Result, roofline: Roofline, prompt_rate: float | None, tokens: float) -> Result:
    """The result with its bound. prompt_rate: prompt tokens per second; tokens: that the cache holds."""
    inputs, outputs = result.sizes.inputs, result.sizes.outputs
    batch = steady_batch(inputs, outputs, tokens)
    ceilings = roofline.ceilings
    rates = Rates(bandwidth=ceilings.bandwidth, flops=ceilings.flops, prompt_tokens=prompt_rate)
    cost = token_cost(roofline.cost, inputs, outputs, batch)
    return evolve(result, bound=find_bound(inputs, outputs, cost, rates, batch))


def show(rate: float | None) -> str:
    """A rate as a cell of a table; "" for an unknown one."""
    return "" if rate is None else f"{rate:,.0f}"


def print_results(results: Sequence[Result], published: dict[str, Published], machine: str) -> None:
    """Print a table of rates and bounds."""
    columns = ("load", "in flight", "steady", "whole load", "serial 85 %", "serial 97 %", "overlap")
    print_table(
        (*columns, "TensorRT-LLM", "goal", "of serial 85 %", "preemptions"),
        [
            (
                result.name,
                result.sizes.in_flight,
                show(result.steady),
                show(result.whole) + ("" if result.complete else " (cut)"),
                *map(show, (bound.serial, bound.serial_best, bound.overlap) if bound else (None, None, None)),
                *map(show, (known.rate, known.goal) if known else (None, None)),
                percent(result.share(result.whole if result.steady is None else result.steady)),
                result.preemptions,
            )
            for result in results
            for bound, known in [(result.bound, published.get(result.name))]
        ],
        title=f"output tokens per second on {machine}",
    )


def parse_arguments() -> argparse.Namespace:
    """The options; exits with a sentence where they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default=",".join(PUBLISHED), help="IN/OUT with commas between; all ten by default")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="of each load from when the batch is full; drops what is left")
    length.add_argument("--requests", type=int, help="of full length of each load, after the first, of spread ages")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="STEPS", help="of each load to profile after its window"
    )
    parser.add_argument("--model", default=MODEL, choices=MODELS)
    parser.add_argument("--quant", default=QUANT, help="quantization method")
    parser.add_argument("--kv-dtype", default=KV_DTYPE, help="dtype of keys and values")
    parser.add_argument("--max-running", type=int, default=MAX_RUNNING, help="maximum sequences per step")
    parser.add_argument("--in-flight", type=int, help="maximum requests in the engine, if less than --max-running")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--bandwidth", type=float, help="for the bounds, TB/s; by default a copy is timed")
    parser.add_argument("--matmul", type=float, help="for the bounds, TFLOP/s; by default a matmul is timed")
    parser.add_argument("--prompt-rate", type=float, help="for the bounds, prompt tokens/s; default: by the matmul")
    parser.add_argument("--json", type=Path, help="file to write the result to, also after each load")
    arguments = parser.parse_args()
    for name in arguments.loads.split(","):
        try:
            parse_case(name)
        except ValueError:
            parser.error(f"{name!r} is not IN/OUT, as 1000/1000")
    if arguments.profile and arguments.seconds is None:
        parser.error("--profile needs --seconds, which ends a load while its batch is full")
    for option in ("seconds", "requests", "max_running", "in_flight"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            parser.error(f"--{option.replace('_', '-')} must be positive")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    names = list(dict.fromkeys(arguments.loads.split(",")))
    overrides: dict[str, Any] = {
        "model.load_format": "dummy",
        "model.max_len": max(sum(parse_case(name)) for name in names) + 16,
        "cache.prefix_caching": False,
        "cache.dtype": arguments.kv_dtype,
        "quant.name": arguments.quant,
        "scheduler.max_running": arguments.max_running,
    }
    overrides |= dict(text.split("=", 1) for text in arguments.given)
    if "cache.memory" not in overrides:
        overrides.setdefault("cache.memory_fraction", MEMORY_FRACTION)
    as_published = (arguments.model, arguments.quant, arguments.kv_dtype) == (MODEL, QUANT, KV_DTYPE)
    published = PUBLISHED if as_published else {}
    results: list[Result] = []

    def save(ceilings: str | None) -> None:
        if arguments.json is None:
            return
        rows = [row for result in results for row in result.rows(published.get(result.name))]
        settings = engine_settings(engine) | {
            "model": arguments.model,
            "quant": arguments.quant,
            "kv_dtype": engine.cache_info.kv_dtype,
            "cache_tokens": round(cache_tokens(engine)),
            "in_flight": {result.name: result.sizes.in_flight for result in results},
            "requests": arguments.requests or ("as published" if arguments.seconds is None else None),
            "seconds": arguments.seconds,
            "given": arguments.given,
            "ceilings": ceilings,
        }
        write(arguments.json, report("ten-loads", machine, rows, settings))

    with tempfile.TemporaryDirectory() as directory:
        overrides["model.path"] = str(write_model(Path(directory), arguments.model))
        with opened(load_config(overrides=overrides).config) as engine:
            machine = engine.cache_info.device
            for result in measure(engine, names, arguments):
                results.append(result)
                save(None)
    roofline = measured_roofline(engine, arguments.bandwidth, arguments.matmul)
    if roofline is not None:
        tokens = cache_tokens(engine)
        results = [with_bound(result, roofline, arguments.prompt_rate, tokens) for result in results]
    for result in results:
        if result.profile is not None:
            print_profile(result.profile)
    print_results(results, published, machine)
    save(roofline.ceilings.source if roofline is not None else None)


if __name__ == "__main__":
    main()
