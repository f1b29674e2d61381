"""Output tokens per second under the ten loads that TensorRT-LLM publishes, next to what the device allows.

    python benchmarks/ten_loads.py --seconds 15 [--loads 128/128,1000/1000] [--json FILE]

Random weights and prompts, greedy, ignore_eos, no prefix cache; Llama-3.1-8B in fp8 with a float8 cache by default. A
load is IN/OUT: prompt and output tokens of each of its requests. One engine runs all loads; each load keeps as many
requests in flight as the cache holds at their mean context, at most --max-running, and adds one when one ends.

By default a load is as published: all its requests wait at the start, and the last token ends it, which takes 50
minutes for all ten at the published rates. --seconds and --requests are shorter. The first requests then have spread
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from load_bounds import BEST, EFFICIENT, Bound, Rates, find_bound, steady_batch, token_cost
from models import MODELS, write_model
from steady_load import Run, cache_tokens, find_sizes, run

from engine.cli.bench.load import opened, random_tokens, say
from engine.cli.bench.profile import print_profile, rows_of
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
"""Maximum sequences per step, of all loads. For nine of them the cache holds fewer; 128/128 could have 4,096, but
reading the weights is no limit from 174 rows on, and each further size costs a CUDA graph at start-up."""
MEMORY_FRACTION = 0.92
"""Share of the free memory for weights, activations and cache, unless --set says otherwise."""
POOL = 2**18
"""Random tokens of which all prompts are slices: drawing each prompt would take seconds in which the device waits."""
STEADY = "output tokens a second, steady state"
WHOLE = "output tokens a second, whole load"
SERIAL = f"bound, one after the other, attention at {100 * EFFICIENT:.0f} % of bandwidth"
SERIAL_BEST = f"bound, one after the other, attention at {100 * BEST:.0f} % of bandwidth"
OVERLAP = "bound, prompts next to attention"
CUT = "output tokens a second, from the first request to the end of the window"


@frozen(kw_only=True)
class Result:
    """A run of a load, and what bounds it."""

    name: str
    run: Run
    bound: Bound | None = None

    def share(self, rate: float | None) -> float | None:
        """A rate's share of the serial bound."""
        return None if rate is None or self.bound is None else rate / self.bound.serial

    def rows(self, published: Published | None) -> Iterator[Row]:
        """The figures as rows of a report."""
        run = self.run
        baseline, baseline_name = (published.rate, "TensorRT-LLM, published") if published else (None, None)
        for metric, rate in ((STEADY, run.steady), (WHOLE if run.complete else CUT, run.whole)):
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
        if run.window_seconds is not None and run.step_seconds is not None and run.mean_running is not None:
            yield Row(metric="window", case=self.name, value=run.window_seconds, unit="s")
            yield Row(metric="mean step", case=self.name, value=1e3 * run.step_seconds, unit="ms")
            yield Row(metric="running in a mean step", case=self.name, value=run.mean_running, unit="requests")
        yield Row(metric="whole run", case=self.name, value=run.progress[-1].seconds, unit="s")
        yield Row(metric="preemptions", case=self.name, value=run.preemptions, unit="count")
        if run.profile is not None:
            yield from rows_of(run.profile)


def parse_case(name: str) -> tuple[int, int]:
    """The prompt and output tokens of IN/OUT. Raises ValueError."""
    inputs, outputs = (int(length) for length in name.split("/"))
    if inputs < 1 or outputs < 2:
        raise ValueError(f"{name!r} needs a prompt and two output tokens at least")
    return inputs, outputs


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
        done = run(
            engine,
            name,
            sizes,
            following=following,
            aged=aged,
            seconds=arguments.seconds,
            pool=pool,
            profiled=arguments.profile,
        )
        say(f"{name}: {show(done.steady)} output tokens/s in the window, {show(done.whole)} in all")
        yield Result(name=name, run=done)


def with_bound(result: Result, roofline: Roofline, prompt_rate: float | None, tokens: float) -> Result:
    """The result with its bound. prompt_rate: prompt tokens per second; tokens: that the cache holds."""
    inputs, outputs = result.run.sizes.inputs, result.run.sizes.outputs
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
                result.run.sizes.in_flight,
                show(result.run.steady),
                show(result.run.whole) + ("" if result.run.complete else " (cut)"),
                *map(show, (bound.serial, bound.serial_best, bound.overlap) if bound else (None, None, None)),
                *map(show, (known.rate, known.goal) if known else (None, None)),
                percent(result.share(result.run.whole if result.run.steady is None else result.run.steady)),
                result.run.preemptions,
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
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="given",
        help="any setting, as attention.options.prefill_dtype=fp8",
    )
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
            "in_flight": {result.name: result.run.sizes.in_flight for result in results},
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
        if result.run.profile is not None:
            print_profile(result.run.profile)
    print_results(results, published, machine)
    save(roofline.ceilings.source if roofline is not None else None)


if __name__ == "__main__":
    main()
