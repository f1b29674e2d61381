"""What `engine profile layers` prints and writes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import typer
from attrs import frozen

from engine.cli.bench.load import say
from engine.cli.tables import print_table

if TYPE_CHECKING:
    from engine.core.profiling import LayerTable, Peaks, RankLayers


@frozen(kw_only=True)
class Profiled:
    """Steps of one kind by layer."""

    title: str
    ranks: tuple[RankLayers, ...]
    step_us: float | None
    """us per step by the engine's clock, without the profiler; of a server, the mean of all steps since the profile
    began. None: unknown."""
    profiled_us: float | None
    """us per step by the engine's clock, under the profiler; None: unknown, as for a server."""


Column = tuple[str, Callable[[Any], str]]


def print_layers(profiled: Profiled, table: LayerTable, peaks: Peaks | None) -> None:
    """Print the table, its sum, and what the ranks did."""
    many = len(table.ranks) > 1
    device = "operators us" if table.device == "cpu" else "device us"
    columns: list[Column] = [
        ("module", lambda line: line.name),
        ("calls", lambda line: _number(line.calls, "g")),
        ("CPU us", lambda line: _number(line.cpu_us)),
        (device, lambda line: f"{line.device_us:,.1f}"),
        ("share", lambda line: f"{line.share:.1%}"),
        ("MB", lambda line: _number(line.bytes / 1e6, ",.3f")),
        ("GFLOP", lambda line: _number(line.flops / 1e9, ",.3f")),
        ("FLOP/B", lambda line: _number(line.intensity)),
    ]
    if peaks is not None:
        columns += [
            ("floor us", lambda line: _number(line.floor_us, ",.2f")),
            ("reached", lambda line: "" if line.reached is None else f"{line.reached:.1%}"),
        ]
    if many:
        columns += [
            ("collective us", lambda line: _number(line.collective_us)),
            ("spread us", lambda line: f"{line.spread_us:,.1f}"),
            ("slowest", lambda line: f"rank {line.slowest}"),
        ]
    rows = [[cell(line) for _, cell in columns] for line in table.lines]
    total = {
        "module": "sum",
        "CPU us": _number(sum(line.cpu_us for line in table.lines)),
        device: f"{table.sum_us:,.1f}",
        "share": f"{table.sum_us / table.step_us:.1%}",
        "MB": _number(table.bytes / 1e6, ",.3f"),
        "GFLOP": _number(table.flops / 1e9, ",.3f"),
        "FLOP/B": _number(table.flops / table.bytes if table.bytes else None),
        "floor us": _number(table.floor_us, ",.2f"),
        "reached": "" if table.floor_us is None else f"{table.floor_us / table.step_us:.1%}",
        "collective us": _number(sum(line.collective_us for line in table.lines)),
    }
    rows.append([total.get(name, "") for name, _ in columns])
    shown = f", rank {table.rank} of {len(table.ranks)}" if many else ""
    print_table(
        [name for name, _ in columns], rows, title=f"{profiled.title}: a step by layer, {table.steps} steps{shown}"
    )
    if many:
        print_ranks(table)
    compared = [f"us per step: {table.sum_us:,.1f} sum of the table, {table.busy_us:,.1f} without (idle)"]
    served = profiled.profiled_us is None
    others = "by the engine's clock, in all steps of these seconds" if served else "without the profiler"
    for what, clock in (("by the engine's clock", profiled.profiled_us), (others, profiled.step_us)):
        if clock is not None:
            compared.append(f"{clock:,.1f} {what} ({table.sum_us / clock - 1:+.1%})")
    typer.echo("; ".join(compared))
    graphs = [f"{key} ({count})" for key, count in profiled.ranks[0].graphs if key]
    if graphs:
        typer.echo(f"CUDA graphs, with the number of steps: {'; '.join(graphs)}")
    if uncounted := profiled.ranks[0].uncounted:
        typer.echo(f"modules whose FLOPs are unknown, and so not counted: {', '.join(uncounted)}")
    if peaks is None:
        typer.echo(
            "no floors: the device's peaks are not known; give --peak-bandwidth and --peak-flops, as `engine bench"
            " latency` measures them" + (", when the server is started" if profiled.profiled_us is None else "")
        )
    else:
        typer.echo(f"floors by {peaks.bandwidth / 1e12:g} TB/s and {peaks.flops / 1e12:g} TFLOP/s ({peaks.source})")


def print_ranks(table: LayerTable) -> None:
    """Print what each rank did, and which computes longest."""
    rows = [
        (one.rank, *(f"{value:,.1f}" for value in (one.step_us, one.compute_us, one.collective_us, one.idle_us)))
        for one in table.ranks
    ]
    print_table(("rank", "step us", "computing us", "collectives us", "idle us"), rows, title="A step by rank")
    typer.echo(table.slowest)


def _number(value: float | None, form: str = ",.1f") -> str:
    return format(value, form) if value else ""


FIELDS = (
    "name",
    "kind",
    "modules",
    "calls",
    "kernels",
    "cpu_us",
    "device_us",
    "collective_us",
    "share",
    "bytes",
    "flops",
)
DERIVED = ("intensity", "floor_us", "reached", "spread_us", "slowest")


def _cells(line: Any) -> dict[str, Any]:
    return {name: getattr(line, name) for name in (*FIELDS, *DERIVED)}


def write_csv(path: Path, profiled: Sequence[Profiled], tables: Sequence[LayerTable]) -> None:
    """Write the lines of all tables into one file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("steps", "rank", *FIELDS, *DERIVED))
        writer.writeheader()
        for one, table in zip(profiled, tables, strict=True):
            for line in table.lines:
                writer.writerow({"steps": one.title, "rank": table.rank, **_cells(line)})
    say(f"written to {path}")


def as_json(profiled: Profiled, table: LayerTable) -> dict[str, Any]:
    """A table as plain data."""
    return {
        "title": profiled.title,
        "steps": table.steps,
        "rank": table.rank,
        "step_us": table.step_us,
        "sum_us": table.sum_us,
        "busy_us": table.busy_us,
        "engine_clock_us": profiled.profiled_us,
        "without_profiler_us": profiled.step_us,
        "graphs": dict(profiled.ranks[0].graphs),
        "bytes": table.bytes,
        "flops": table.flops,
        "floor_us": table.floor_us,
        "ranks": [attrs.asdict(one) for one in table.ranks],
        "lines": [_cells(line) for line in table.lines],
    }
