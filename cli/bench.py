"""`engine bench`: how fast the engine is on this machine."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import frozen

from engine.cli.opening import open_engine
from engine.cli.options import OFFLINE, configured
from engine.core.errors import ConfigError
from engine.core.settings import Resolved

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.types import EngineStats, Request

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Keeps `throughput` a command of its own."""


@frozen(kw_only=True)
class Load:
    """Requests of random tokens: (prompt tokens, output tokens) for each."""

    lengths: tuple[tuple[int, int], ...]
    seed: int

    def requests(self, vocab_size: int, prefix: str = "") -> list[Request]:
        """Greedy requests that go on past end-of-sequence tokens, so that every run does the same work.

        prefix: begins their names; another prefix draws other tokens, so that no run finds the last one's in a cache.
        """
        from engine.core.types import Request, SamplingParams

        draw = random.Random(f"{self.seed} {prefix}")
        return [
            Request(
                id=f"{prefix}{number}",
                prompt=tuple(draw.randrange(vocab_size) for _ in range(inputs)),
                params=SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True),
                arrival=time.monotonic(),
            )
            for number, (inputs, outputs) in enumerate(self.lengths)
        ]


@frozen(kw_only=True)
class Measured:
    """One run of a load."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    phases: dict[str, float]
    """Seconds in each phase; those of the runner are part of submit or wait."""


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """ "512" or "100-1024" as (low, high). Raises ConfigError naming the flag."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ConfigError(f"{flag} {text!r} is no length; give a number of tokens, or a range as 100-1024")
    bounds = int(match[1]), int(match[2] or match[1])
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{flag} {text!r} is an empty range")
    return bounds


def make_load(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Load:
    """`count` requests with lengths drawn evenly from the ranges."""
    draw = random.Random(seed)
    return Load(lengths=tuple((draw.randint(*inputs), draw.randint(*outputs)) for _ in range(count)), seed=seed)


def run_load(engine: Engine, load: Load, *, prefix: str = "", progress: bool = False) -> Measured:
    """Give the engine all requests at once and wait for the last token."""
    from rich.console import Console
    from rich.progress import Progress

    requests = load.requests(engine.vocab_size, prefix)
    before = engine.stats()
    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("tokens", total=sum(outputs for _, outputs in load.lengths))
        begin = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            made = sum(len(output.tokens) for output in engine.step())
            bar.advance(task, made)
        seconds = time.perf_counter() - begin
    return _difference(before, engine.stats(), seconds)


def _difference(before: EngineStats, after: EngineStats, seconds: float) -> Measured:
    past = dict(before.seconds)
    return Measured(
        seconds=seconds,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        output_tokens=after.generation_tokens - before.generation_tokens,
        steps=after.steps - before.steps,
        phases={phase: spent - past.get(phase, 0.0) for phase, spent in after.seconds},
    )


@app.command()
@configured(without=OFFLINE)
def throughput(
    *,
    requests: Annotated[int, typer.Option(help="Requests, all given at once.", min=1)] = 32,
    input_len: Annotated[str, typer.Option(help="Prompt tokens a request: a number, or a range as 100-1024.")] = "128",
    output_len: Annotated[str, typer.Option(help="Output tokens a request: a number, or a range.")] = "128",
    seed: Annotated[int, typer.Option(help="Seed of lengths and prompts.")] = 0,
    repeat: Annotated[int, typer.Option(help="Runs, after one to warm up; the median counts.", min=1)] = 3,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    resolved: Resolved,
) -> None:
    """Tokens a second over a batch of requests, and where the time goes."""
    from rich.console import Console
    from rich.table import Table

    from engine.cli.bench_report import Row, report, write

    load = make_load(requests, parse_range(input_len, "--input-len"), parse_range(output_len, "--output-len"), seed)
    with open_engine(resolved) as engine:
        run_load(engine, load, prefix="warm-up-", progress=True)
        runs = [run_load(engine, load, prefix=f"{run}-", progress=True) for run in range(repeat)]
        median = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        machine, settings = engine.cache_info.device, _settings(engine, load, repeat)
    rows = [
        Row(metric="output tokens a second", value=median.output_tokens / median.seconds, unit="tokens/s"),
        Row(metric="prompt and output tokens a second", value=_all(median) / median.seconds, unit="tokens/s"),
        Row(metric="time of the run", value=median.seconds, unit="s"),
        Row(metric="slowest over fastest run", value=_spread(runs), unit="x"),
        Row(metric="mean step", value=median.seconds / max(median.steps, 1) * 1e3, unit="ms"),
        *(
            Row(metric=f"{phase}, of a mean step", value=spent / max(median.steps, 1) * 1e3, unit="ms")
            for phase, spent in median.phases.items()
        ),
    ]
    table = Table("", "value", "unit", title=f"{requests} requests, {input_len} in / {output_len} out, on {machine}")
    for row in rows:
        table.add_row(row.metric, f"{row.value:,.3f}", row.unit)
    Console().print(table)
    if output is not None:
        write(output, report("throughput", machine, rows, settings))
        typer.echo(f"written to {output}", err=True)


def _all(run: Measured) -> int:
    return run.prompt_tokens + run.output_tokens


def _spread(runs: list[Measured]) -> float:
    return max(run.seconds for run in runs) / min(run.seconds for run in runs)


def _settings(engine: Engine, load: Load, repeat: int) -> dict[str, object]:
    config = engine.config
    return {
        "model": Path(config.model.path).name,
        "dtype": engine.cache_info.dtype,
        "plugins": {choice.seam: choice.name for choice in engine.parts.choices},
        "max_running": config.scheduler.max_running,
        "max_batch_tokens": config.scheduler.max_batch_tokens,
        "prefix_caching": config.cache.prefix_caching,
        "requests": len(load.lengths),
        "prompt_tokens": sum(inputs for inputs, _ in load.lengths),
        "output_tokens": sum(outputs for _, outputs in load.lengths),
        "seed": load.seed,
        "repeat": repeat,
    }
