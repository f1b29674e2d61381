"""`engine bench throughput`: tokens per second over a batch of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import frozen

from engine.cli.bench.ceilings import Bandwidth, MatmulRate
from engine.cli.bench.load import Load, Measured, make_load, opened, parse_range, run_load, say
from engine.cli.bench.report import Json, Plot, Row, engine_settings, percent, report, write
from engine.cli.bench.roofline import Roofline, measured_roofline
from engine.cli.options import OFFLINE, configured
from engine.cli.tables import print_table
from engine.core.config import Resolved
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.engine import Engine

PRESETS = {"512x256": (1000, (512, 512), (256, 256)), "uneven": (256, (100, 1024), (100, 1024))}
"""Usual loads for comparing engines, as (requests, prompt tokens, output tokens)."""


@frozen(kw_only=True)
class Result:
    """Results of one load over several runs."""

    load: Load
    runs: tuple[Measured, ...]
    floor: float | None = None
    """Seconds at the roofline."""

    @property
    def median(self) -> Measured:
        """The median run by time."""
        return sorted(self.runs, key=lambda run: run.seconds)[len(self.runs) // 2]

    @property
    def spread(self) -> float:
        """Time of the slowest run over that of the fastest."""
        return max(run.seconds for run in self.runs) / min(run.seconds for run in self.runs)

    @property
    def share(self) -> float | None:
        """Share of the roofline."""
        return None if self.floor is None else self.floor / self.median.seconds

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.median.output_tokens / self.median.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.median.prompt_tokens + self.median.output_tokens) / self.median.seconds


def parse_load(text: str, seed: int) -> Load:
    """Parse a preset's name, or COUNT:IN:OUT with lengths as `parse_range` reads them. Raises ConfigError."""
    if text in PRESETS:
        return make_load(*PRESETS[text], seed)
    count, *lengths = text.split(":")
    if len(lengths) != 2 or not count.isdigit() or int(count) < 1:
        known = ", ".join(PRESETS)
        raise ConfigError(f"--load {text!r} is neither a preset ({known}) nor COUNT:IN:OUT as 32:100-1024:128")
    return make_load(int(count), parse_range(lengths[0], "--load"), parse_range(lengths[1], "--load"), seed)


def measure(engine: Engine, load: Load, repeat: int) -> Result:
    """Run a load several times."""
    runs = []
    for number in range(repeat):
        runs.append(run_load(engine, load, prefix=f"{load.name} {number}-"))
        say(f"{load.name}: {runs[-1].output_tokens / runs[-1].seconds:,.0f} output tokens/s")
    return Result(load=load, runs=tuple(runs))


def rows_of(result: Result) -> Iterator[Row]:
    """The figures of one load as rows of a report."""
    median, case = result.median, result.load.name
    steps = max(median.steps, 1)
    for metric, value, unit in (
        ("output tokens a second", result.output_rate, "tokens/s"),
        ("prompt and output tokens a second", result.total_rate, "tokens/s"),
        ("time of the run", median.seconds, "s"),
        ("slowest over fastest run", result.spread, "x"),
        ("mean step", median.seconds / steps * 1e3, "ms"),
        *((f"{phase}, of a mean step", spent / steps * 1e3, "ms") for phase, spent in median.phases.items()),
    ):
        share = result.share if metric == "output tokens a second" else None
        yield Row(metric=metric, case=case, value=value, unit=unit, share=share)


def with_floor(result: Result, roofline: Roofline, max_running: int) -> Result:
    """The result with its roofline."""
    return Result(load=result.load, runs=result.runs, floor=roofline.load(result.load.lengths, max_running))


@configured(without=OFFLINE)
def throughput(
    *,
    loads: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            help=f"A load: {', '.join(PRESETS)} or COUNT:IN:OUT as 32:100-1024:128. Repeat for more; the engine starts"
            " once.",
            metavar="LOAD",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests, all added before the first step; by default 32.", min=1, show_default=False),
    ] = None,
    input_len: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens per request: a number, or a range as 100-1024; by default 128.", show_default=False
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(help="Output tokens per request: a number, or a range; by default 128.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and prompts.")] = 0,
    repeat: Annotated[int, typer.Option(help="Runs of each load, after a short one to warm up.", min=1)] = 3,
    bandwidth: Bandwidth = None,
    matmul: MatmulRate = None,
    output: Json = None,
    plot: Plot = None,
    resolved: Resolved,
) -> None:
    """Tokens per second over a batch of requests, and the time by phase. The median run counts."""
    if loads and (requests, input_len, output_len) != (None, None, None):
        raise ConfigError("--load names requests and lengths; leave out --requests, --input-len and --output-len")
    inputs, outputs = parse_range(input_len or "128", "--input-len"), parse_range(output_len or "128", "--output-len")
    wanted = [parse_load(text, seed) for text in loads or ()] or [make_load(requests or 32, inputs, outputs, seed)]

    with opened(resolved.config) as engine:
        results = [measure(engine, load, repeat) for load in wanted]
    roofline = measured_roofline(engine, bandwidth, matmul)
    if roofline is not None:
        results = [with_floor(result, roofline, engine.config.scheduler.max_running) for result in results]
    machine = engine.cache_info.device
    print_results(results, machine)
    settings = engine_settings(engine) | {
        "loads": [_describe(result.load) for result in results],
        "seed": seed,
        "repeat": repeat,
        "ceilings": roofline.ceilings.source if roofline is not None else None,
    }
    if output is not None:
        write(output, report("throughput", machine, [row for one in results for row in rows_of(one)], settings))
    if plot is not None:
        from engine.cli.bench.plot import plot_throughput

        plot_throughput(plot, results, machine)


def print_results(results: Sequence[Result], machine: str) -> None:
    """Print a table of rates, and one of the time of a mean step by phase."""
    print_table(
        ("load", "output tokens/s", "all tokens/s", "seconds", "slowest/fastest", "of roofline"),
        [
            (
                result.load.name,
                f"{result.output_rate:,.0f}",
                f"{result.total_rate:,.0f}",
                f"{result.median.seconds:.3f}",
                f"{result.spread:.3f}",
                percent(result.share),
            )
            for result in results
        ],
        title=f"throughput on {machine}",
    )
    phases = list(dict.fromkeys(phase for result in results for phase in result.median.phases))
    print_table(
        ("load", "steps", "mean step, ms", *phases),
        [
            (
                result.load.name,
                median.steps,
                f"{median.seconds / max(median.steps, 1) * 1e3:.3f}",
                *(f"{median.phases.get(phase, 0.0) / max(median.steps, 1) * 1e3:.3f}" for phase in phases),
            )
            for result in results
            for median in [result.median]
        ],
        title="ms of a mean step by phase (the runner's phases are part of submit or wait)",
    )


def _describe(load: Load) -> dict[str, object]:
    return {
        "name": load.name,
        "requests": len(load.lengths),
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
    }
