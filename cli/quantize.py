"""`engine quantize`: write a quantized checkpoint."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.tables import print_table
from engine.core.config import ModelConfig, parse_bytes
from engine.core.errors import ConfigError
from engine.core.hub import locate
from engine.core.startup_display import show_startup
from engine.quantize.progress import Progress
from engine.quantize.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.quantize.report import LayerReport, Report

WEIGHTS = "4- or 8-bit weights: rtn, gptq, awq"
EIGHT = "8-bit weights and activations: fp8, int8"
TEXT = "text"
FILES = "files"
REPORT_SECONDS = 10.0
"""Maximum time between two lines, unless a single window takes longer."""


def quantize(
    model: Annotated[
        str,
        typer.Argument(help="Directory of the checkpoint, unquantized, or its name on the hub.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Argument(help="Directory to write: a new one, or that of an unfinished run.", show_default=False)
    ],
    method: Annotated[
        str,
        typer.Option(
            help="fp8 or int8 (weights and activations), rtn (weights, rounded to nearest), gptq or awq (weights, with"
            " calibration text), or none (weights unchanged, for --kv-cache alone).",
            show_default=False,
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compressed-tensors, gptq or awq. Default: the one named like the method, else compressed-tensors.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="4 or 8. Default: 4.", show_default=False, rich_help_panel=WEIGHTS)
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs per scale; -1: all. Default: 128.", show_default=False, rich_help_panel=WEIGHTS),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--no-symmetric",
            help="Whether zero points are fixed. Default: yes, but no for awq.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    act_order: Annotated[
        str | None,
        typer.Option(
            help="gptq: order in which inputs are quantized: none (their own), weight (largest activations first) or"
            " group (the same, and groups follow that order: desc_act). Default: weight.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    damp: Annotated[
        float | None,
        typer.Option(
            help="gptq: share of the mean of the Hessian's diagonal added to the diagonal. Default: 0.01.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="Weights per scale: tensor, channel or block (fp8), channel (int8). Default: channel.",
            show_default=False,
            rich_help_panel=EIGHT,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="Scales of activations: dynamic (one per token, computed at run time) or static (one per tensor,"
            " from calibration text). Default: dynamic.",
            show_default=False,
            rich_help_panel=EIGHT,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="fp8: store scales for a float8 KV cache, from calibration text; the checkpoint is then served with"
            " such a cache. Format compressed-tensors, any method.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help='Module that stays unquantized, by name or as "re:PATTERN"; the LM head always does. Repeat for more.',
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to run through the model; required by gptq, awq, static activations and --kv-cache; other"
            " methods use it to report the error of the outputs. Repeat for more.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration samples.", rich_help_panel=TEXT)] = 128,
    sample_length: Annotated[int, typer.Option(help="Tokens per sample.", rich_help_panel=TEXT)] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the choice of samples.", rich_help_panel=TEXT)] = 0,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Text on which to measure perplexity, before and after; must not be calibration text.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per window of held-out text.", rich_help_panel=TEXT)] = 1024,
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit of a model on the hub; by default main.", show_default=False)
    ] = "",
    download_dir: Annotated[
        str,
        typer.Option(
            help="Directory of the models from the hub; by default the cache of huggingface_hub.",
            metavar="DIR",
            show_default=False,
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a safetensors file, as 500MB or 2GiB.", rich_help_panel=FILES)
    ] = "5GB",
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Delete the results of an unfinished run in OUTPUT and start again.",
            rich_help_panel=FILES,
        ),
    ] = False,
) -> None:
    """Write a quantized copy of a checkpoint, layer by layer.

    After an interruption, the same command continues after the last finished layer. Errors and perplexity are printed
    and written to OUTPUT/quantize_report.json.
    """
    settings = Settings.choose(
        method,
        ignore=tuple(ignore or ()),
        kv_cache=kv_cache,
        format=form,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        act_order=act_order,
        damp=damp,
        granularity=granularity,
        activations=activations,
    )
    try:
        shard_bytes = parse_bytes(max_shard_size)
    except ConfigError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error

    with show_startup(lines=False, prefix="") as listener:
        source = locate(ModelConfig(path=model, revision=revision, download_dir=download_dir), listener).path

    from engine.quantize.calibration import Calibration, read_text
    from engine.quantize.run import HeldOut, quantize as run

    text = None
    if calibration:
        text = Calibration(files=tuple(calibration), samples=samples, length=sample_length, seed=seed)
    held = None if held_out is None else HeldOut(text=read_text(held_out, "--held-out"), context=context)
    report = run(
        source,
        output,
        settings,
        calibration=text,
        held_out=held,
        device=device,
        shard_bytes=shard_bytes,
        restart=restart,
        progress=Lines(),
    )
    print_report(report, output)


class Lines(Progress):
    """Prints a line on standard error for each step, and every REPORT_SECONDS within a long one."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def resumed(self, done: int, total: int) -> None:
        self.phase(f"continuing after layer {done} of {total}")

    def layer(self, report: LayerReport, total: int) -> None:
        errors = {"weights": report.mean("weight_error"), "outputs": report.mean("output_error")}
        done = [f"error of {what} {percent(error)}" for what, error in errors.items() if error is not None]
        if report.kv_scales is not None:
            done.append(f"KV scales {report.kv_scales.key:.3g} and {report.kv_scales.value:.3g}")
        self.phase(f"layer {report.number + 1} of {total}: {', '.join(done) or 'unchanged'}, {report.seconds:.1f} s")

    def phase(self, text: str) -> None:
        typer.echo(text, err=True)
        self._last = time.monotonic()

    def within(self, text: str, done: int, total: int) -> None:
        if done < total and time.monotonic() - self._last >= REPORT_SECONDS:
            self.phase(f"{text}: {done} of {total} windows ({done / total:.0%})")


def print_report(report: Report, output: Path) -> None:
    """Print the errors and KV scales of each layer, what stays unquantized, size, perplexity and time of the run."""
    columns, rows = ["layer"], [[str(layer.number)] for layer in report.layers]
    if any(layer.linears for layer in report.layers):
        columns += ["error of weights", "error of outputs", "worst in"]
        for row, layer in zip(rows, report.layers, strict=True):
            name = "" if layer.worst is None else layer.worst.name.partition(f".layers.{layer.number}.")[2]
            row.extend((percent(layer.mean("weight_error")), percent(layer.mean("output_error")), name))
    if any(layer.kv_scales for layer in report.layers):
        columns += ["key scale", "value scale"]
        for row, layer in zip(rows, report.layers, strict=True):
            found = layer.kv_scales
            row.extend(("", "") if found is None else (f"{found.key:.4g}", f"{found.value:.4g}"))
    print_table(columns, rows)
    if any(layer.linears for layer in report.layers) and report.unquantized:
        typer.echo(f"unquantized {', '.join(summary(report.unquantized))}")
    share = report.bytes_after / report.bytes_before
    typer.echo(f"size        {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)} ({share:.0%})")
    before, after = report.perplexity_before, report.perplexity_after
    if before is not None and after is not None:
        change = after.value / before.value - 1
        typer.echo(f"perplexity  {before.value:.3f} -> {after.value:.3f} ({change:+.2%}), {before.tokens:,} tokens")
    typer.echo(f"time        {report.seconds:.1f} s")
    typer.echo(f"written to  {output}")


def summary(modules: Sequence[str]) -> list[str]:
    """Names of modules within a decoder layer, without numbers, each with the number of its occurrences."""
    kinds = Counter(re.sub(r"\.\d+(?=\.|$)", ".N", re.sub(r"^.*\.layers\.\d+\.", "", name)) for name in modules)
    return [f"{kind} ({count})" for kind, count in kinds.items()]


def percent(error: float | None) -> str:
    """An error as a cell of a table; "" for an unknown one."""
    return "" if error is None else f"{error:.2%}"


def megabytes(size: int) -> str:
    """Bytes, for people to read."""
    return f"{size / 1e6:,.1f} MB"
