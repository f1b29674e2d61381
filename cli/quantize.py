"""`engine quantize`: write a quantized checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.tables import print_table
from engine.core.errors import ConfigError
from engine.quantize.progress import Progress
from engine.quantize.settings import Settings

if TYPE_CHECKING:
    from engine.quantize.report import LayerReport, Report

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WEIGHTS = "weights of 4 or 8 bits: rtn, gptq, awq"
EIGHT = "weights and activations of 8 bits: fp8, int8"
TEXT = "text"
FILES = "files"


def quantize(
    model: Annotated[Path, typer.Argument(help="Directory of the checkpoint, unquantized.", show_default=False)],
    output: Annotated[
        Path, typer.Argument(help="Directory to write; it must be new, or hold an unfinished run.", show_default=False)
    ],
    method: Annotated[
        str,
        typer.Option(
            help="fp8, int8 (weights and activations), rtn (weights to the nearest), gptq, awq (weights, chosen by"
            " calibration text), or none (weights as they are, for --kv-cache alone).",
            show_default=False,
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compressed-tensors, gptq or awq. Not given: that of the method's name, else compressed-tensors.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="4 or 8. Not given: 4.", show_default=False, rich_help_panel=WEIGHTS)
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale; -1: all. Not given: 128.", show_default=False, rich_help_panel=WEIGHTS
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--no-symmetric",
            help="Whether zero points are fixed. Not given: yes, but no for awq.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    act_order: Annotated[
        str | None,
        typer.Option(
            help="gptq: which inputs come first: none (in their order), weight (those of large activations) or group"
            " (so too, and groups are made in that order: desc_act). Not given: weight.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    damp: Annotated[
        float | None,
        typer.Option(
            help="gptq: added to the Hessian's diagonal, as a share of its mean. Not given: 0.01.",
            show_default=False,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="What shares a scale of weights: tensor, channel or block (fp8), channel (int8). Not given: channel.",
            show_default=False,
            rich_help_panel=EIGHT,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="dynamic (a scale a token, found as it comes) or static (one, from calibration text). Not given:"
            " dynamic.",
            show_default=False,
            rich_help_panel=EIGHT,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="fp8: scales for a float8 KV cache, found by calibration text, which is then served with such a cache;"
            " in the format compressed-tensors, with any method.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help='Module to leave alone, by name or as "re:PATTERN"; the LM head always is. Repeat for more.',
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to run through the model; gptq, awq, static activations and --kv-cache need it, others report"
            " errors of outputs by it. Repeat for more.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Pieces of calibration text.", rich_help_panel=TEXT)] = 128,
    sample_length: Annotated[int, typer.Option(help="Tokens of a piece.", rich_help_panel=TEXT)] = 2048,
    seed: Annotated[int, typer.Option(help="Chooses the pieces.", rich_help_panel=TEXT)] = 0,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Text to measure perplexity on, before and after; none of the calibration text.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window of held-out text.", rich_help_panel=TEXT)] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_shard_size: Annotated[
        str, typer.Option(help="Largest safetensors file, as 500MB or 2GiB.", rich_help_panel=FILES)
    ] = "5GB",
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Throw away what an unfinished run has left in OUTPUT.", rich_help_panel=FILES),
    ] = False,
) -> None:
    """Write a quantized copy of a checkpoint, layer by layer.

    Called again after it was killed, with the same options, it goes on behind the last finished layer. Errors and
    perplexity are printed, and written to OUTPUT/quantize_report.json.
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
    shard_bytes = parse_size(max_shard_size)

    from engine.quantize.calibration import Calibration, read_text
    from engine.quantize.run import HeldOut, quantize as run

    text = None
    if calibration:
        text = Calibration(files=tuple(calibration), samples=samples, length=sample_length, seed=seed)
    held = None if held_out is None else HeldOut(text=read_text(held_out, "--held-out"), context=context)
    report = run(
        model,
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
    """A line on standard error for each step."""

    def resumed(self, done: int, total: int) -> None:
        """See Progress."""
        self.phase(f"going on behind layer {done} of {total}")

    def layer(self, report: LayerReport, total: int) -> None:
        """See Progress."""
        errors = {"weights": report.mean("weight_error"), "outputs": report.mean("output_error")}
        done = [f"{what} off by {percent(error)}" for what, error in errors.items() if error is not None]
        if report.kv_scales is not None:
            done.append(f"scales {report.kv_scales.key:.3g} of keys, {report.kv_scales.value:.3g} of values")
        self.phase(f"layer {report.number + 1} of {total}: {', '.join(done) or 'left alone'}, {report.seconds:.1f} s")

    def phase(self, text: str) -> None:
        """See Progress."""
        typer.echo(text, err=True)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "2GiB" or "1000". Raises ConfigError for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"--max-shard-size {text!r} is no size; write it as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def print_report(report: Report, output: Path) -> None:
    """Errors and KV scales of each layer, and what the whole has become."""
    columns, rows = ["layer"], [[str(layer.number)] for layer in report.layers]
    if any(layer.linears for layer in report.layers):
        columns += ["weights off by", "outputs off by", "most in"]
        for row, layer in zip(rows, report.layers, strict=True):
            name = "" if layer.worst is None else layer.worst.name.partition(f".layers.{layer.number}.")[2]
            row.extend((percent(layer.mean("weight_error")), percent(layer.mean("output_error")), name))
    if any(layer.kv_scales for layer in report.layers):
        columns += ["scale of keys", "scale of values"]
        for row, layer in zip(rows, report.layers, strict=True):
            found = layer.kv_scales
            row.extend(("", "") if found is None else (f"{found.key:.4g}", f"{found.value:.4g}"))
    print_table(columns, rows)
    share = report.bytes_after / report.bytes_before
    typer.echo(f"size        {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)} ({share:.0%})")
    before, after = report.perplexity_before, report.perplexity_after
    if before is not None and after is not None:
        change = after.value / before.value - 1
        typer.echo(f"perplexity  {before.value:.3f} -> {after.value:.3f} ({change:+.2%}), {before.tokens:,} tokens")
    typer.echo(f"time        {report.seconds:.1f} s")
    typer.echo(f"written to  {output}")


def percent(error: float | None) -> str:
    """An error in a table; nothing for one that is not known."""
    return "" if error is None else f"{error:.2%}"


def megabytes(size: int) -> str:
    """Bytes as one reads them."""
    return f"{size / 1e6:,.1f} MB"
