"""`engine bench latency`: the time of a decode step by batch, and of a prefill."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import frozen

from engine.cli.bench.ceilings import Bandwidth, MatmulRate
from engine.cli.bench.load import Load, Measured, check_batch, opened, parse_counts, run_load, say
from engine.cli.bench.report import Json, Plot, Row, engine_settings, percent, report, write
from engine.cli.bench.roofline import Roofline, measured_roofline
from engine.cli.options import OFFLINE, configured
from engine.cli.output_file import output_file
from engine.cli.tables import print_table
from engine.core.config import Resolved
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.engine import Engine

COMPUTE = ("launch", "sample")
"""Phases during which a device that computes inside `submit` (a CPU) is busy."""
PREFILL = (16, 2048)
"""Default of --prefill: prompts computed together, and tokens of each; fewer tokens where the context is shorter."""


@frozen(kw_only=True)
class Decode:
    """Time of a decode step at one batch size."""

    batch: int
    step: float
    """Seconds per step: the difference between a run with many output tokens and one with a single token, per token."""
    phases: Mapping[str, float]
    """Phase -> seconds per step, by the same difference."""
    host: float
    """Seconds per step in which the host does not wait: an upper bound of the device's idle time."""
    context: float
    """Average context length, tokens per sequence."""


@frozen(kw_only=True)
class Prefill:
    """Time of prompts computed together."""

    count: int
    length: int
    seconds: float

    @property
    def name(self) -> str:
        """The prefill, as tables show it."""
        return f"prefill {self.count} x {self.length}"

    @property
    def rate(self) -> float:
        """Prompt tokens per second."""
        return self.count * self.length / self.seconds


@frozen(kw_only=True)
class Latency:
    """All measurements of the command."""

    decodes: tuple[Decode, ...]
    prefill: Prefill | None

    def rows(self, roofline: Roofline | None) -> Iterator[Row]:
        """The figures as rows of a report."""
        for one in self.decodes:
            share = None if roofline is None else roofline.decode(one.batch, one.context) / one.step
            name = f"batch {one.batch}"
            yield Row(metric="decode step", case=name, value=one.step * 1e3, unit="ms", share=share)
            yield Row(metric="output tokens a second", case=name, value=one.batch / one.step, unit="tokens/s")
            yield Row(metric="host time of a decode step", case=name, value=one.host * 1e6, unit="us")
            for phase, spent in one.phases.items():
                yield Row(metric=f"{phase}, of a decode step", case=name, value=spent * 1e6, unit="us")
        if self.prefill is not None:
            lengths = [self.prefill.length] * self.prefill.count
            share = None if roofline is None else roofline.prefill(lengths) / self.prefill.seconds
            yield Row(metric="prefill", case=self.prefill.name, value=self.prefill.rate, unit="tokens/s", share=share)


def check_lengths(engine: Engine, inputs: int, steps: int, prefill: tuple[int, int] | None) -> None:
    """Raise ConfigError if a sequence of the decode steps or of the prefill does not fit into the context."""
    lengths = {"--input-len and --steps": inputs + 1 + steps}
    if prefill is not None:
        lengths["--prefill"] = prefill[1] + 1
    for options, tokens in lengths.items():
        if tokens > engine.max_len:
            raise ConfigError(
                f"sequences of {options} have {tokens} tokens, and the context holds {engine.max_len}; give less"
            )


def measure(
    engine: Engine,
    batches: Sequence[int],
    *,
    inputs: int = 128,
    steps: int = 128,
    prefill: tuple[int, int] | None = PREFILL,
    repeat: int = 2,
) -> Latency:
    """Measure decode steps by batch, then a prefill of (prompts, tokens each); the fastest of `repeat` runs counts.

    Raises ConfigError, before the first measurement, for batches or lengths that cannot run.
    """
    check_batch(engine, max(batches))
    check_lengths(engine, inputs, steps, prefill)
    decodes = [measure_decode(engine, batch, inputs, steps, repeat) for batch in batches]
    measured = None
    if prefill is not None:
        best = _fastest(engine, prefill[0], prefill[1], 1, repeat)
        measured = Prefill(count=prefill[0], length=prefill[1], seconds=best.seconds)
        say(f"{measured.name}: {measured.rate:,.0f} tokens/s")
    return Latency(decodes=tuple(decodes), prefill=measured)


def measure_decode(engine: Engine, batch: int, inputs: int, steps: int, repeat: int) -> Decode:
    """Measure a decode step of `batch` sequences with prompts of `inputs` tokens, over `steps` steps."""
    short = _fastest(engine, batch, inputs, 1, repeat)
    long = _fastest(engine, batch, inputs, 1 + steps, repeat)
    step = (long.seconds - short.seconds) / steps
    phases = {phase: (spent - short.phases.get(phase, 0.0)) / steps for phase, spent in long.phases.items()}
    device = sum(phases.get(phase, 0.0) for phase in COMPUTE) if engine.device.type == "cpu" else 0.0
    say(f"batch {batch}: {step * 1e3:.3f} ms per decode step")
    return Decode(
        batch=batch,
        step=step,
        phases=phases,
        host=step - phases.get("wait", 0.0) - device,
        context=inputs + (1 + steps) / 2,
    )


def _fastest(engine: Engine, count: int, inputs: int, outputs: int, repeat: int) -> Measured:
    load = Load(name="", lengths=((inputs, outputs),) * count)
    runs = [run_load(engine, load, prefix=f"{count} {inputs} {outputs} {number}-") for number in range(repeat)]
    return min(runs, key=lambda run: run.seconds)


def parse_prefill(text: str) -> tuple[int, int] | None:
    """Parse "16x2048" as (prompts, tokens each); None for "none". Raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None and text != "none":
        raise ConfigError(f"--prefill {text!r} is neither PROMPTSxTOKENS, as 16x2048, nor none")
    return match and (int(match[1]), int(match[2]))


@configured(without=OFFLINE)
def latency(
    *,
    batch: Annotated[str, typer.Option(help="Batch sizes of decode steps, as 1,8,32.")] = "1,8,32,64,128,256",
    input_len: Annotated[int, typer.Option(help="Prompt tokens per decoding sequence.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Decode steps to time.", min=1)] = 128,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="Prompts to compute together, PROMPTSxTOKENS; or none. Default: 16x2048, shorter if the context is."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs per measurement; the fastest counts.", min=1)] = 2,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show the time of a step by kernel, and the time without a kernel.")
    ] = False,
    profile_steps: Annotated[int, typer.Option(help="Decode steps to profile.", min=1)] = 50,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="With --profile: write the times of host phases and kernels of a few steps.",
            metavar="FILE",
            callback=output_file,
        ),
    ] = None,
    bandwidth: Bandwidth = None,
    matmul: MatmulRate = None,
    output: Json = None,
    plot: Plot = None,
    resolved: Resolved,
) -> None:
    """Time of a decode step by batch size and of a prefill, with the share of the host."""
    batches = parse_counts(batch, "--batch")
    prompts = None if prefill is None else parse_prefill(prefill)
    if trace is not None and not profile:
        raise ConfigError("--trace writes what --profile records; give both")
    from engine.cli.bench import profile as profiling

    with opened(resolved.config) as engine:
        if prefill is None:
            prompts = PREFILL[0], min(PREFILL[1], engine.max_len - 1)
        measured = measure(engine, batches, inputs=input_len, steps=steps, prefill=prompts, repeat=repeat)
        profiles = []
        if profile:
            profiling.check(engine)
            profiles += [profiling.profile_decode(engine, one, input_len, profile_steps) for one in batches]
            if prompts is not None:
                profiles.append(profiling.profile_prefill(engine, *prompts))
    roofline = measured_roofline(engine, bandwidth, matmul)
    machine = engine.cache_info.device
    print_latency(measured, roofline, machine)
    for one in profiles:
        profiling.print_profile(one)
    rows = [*measured.rows(roofline), *(row for one in profiles for row in profiling.rows_of(one))]
    settings = engine_settings(engine) | {
        "input_len": input_len,
        "steps": steps,
        "repeat": repeat,
        "ceilings": roofline.ceilings.source if roofline is not None else None,
    }
    if output is not None:
        write(output, report("latency", machine, rows, settings))
    if trace is not None:
        timelines = [one.timeline() for one in profiles]
        write(trace, report("trace", machine, [], settings) | {"profiles": timelines})
    if plot is not None:
        from engine.cli.bench.plot import plot_latency

        plot_latency(plot, measured, roofline, machine)


def print_latency(measured: Latency, roofline: Roofline | None, machine: str) -> None:
    """Print a table of decode steps, one of host times, and a line for the prefill."""
    ceilings = f"; {roofline.ceilings.source}" if roofline is not None else ""
    print_table(
        ("batch", "ms per step", "tokens/s", "weights, ms", "roofline, ms", "of roofline"),
        [
            (
                one.batch,
                f"{one.step * 1e3:.3f}",
                f"{one.batch / one.step:,.0f}",
                f"{roofline.weights() * 1e3:.3f}" if roofline is not None else "",
                f"{roofline.decode(one.batch, one.context) * 1e3:.3f}" if roofline is not None else "",
                percent(roofline.decode(one.batch, one.context) / one.step if roofline is not None else None),
            )
            for one in measured.decodes
        ],
        title=f"decode step on {machine}{ceilings}",
    )
    phases = list(dict.fromkeys(phase for one in measured.decodes for phase in one.phases))
    print_table(
        ("batch", "step", "host, not waiting", *phases),
        [
            (
                one.batch,
                f"{one.step * 1e6:,.0f}",
                f"{one.host * 1e6:,.0f}",
                *(f"{one.phases.get(phase, 0.0) * 1e6:,.0f}" for phase in phases),
            )
            for one in measured.decodes
        ],
        title="us of a decode step by phase (the runner's phases are part of submit or wait)",
    )
    if measured.prefill is not None:
        [row] = [row for row in measured.rows(roofline) if row.metric == "prefill"]
        share = f", {percent(row.share)} of roofline" if row.share is not None else ""
        typer.echo(f"{row.case}: {row.value:,.0f} tokens/s, {measured.prefill.seconds * 1e3:.1f} ms{share}")
