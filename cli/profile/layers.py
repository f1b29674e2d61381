"""`engine profile layers`: the time, bytes and FLOPs of every layer in decode and prefill steps of an offline load."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
import typer
from attrs import frozen

from engine.cli.bench.load import Load, opened, say
from engine.cli.bench.report import Json, engine_settings, header, write
from engine.cli.options import OFFLINE, configured
from engine.cli.tables import print_table
from engine.core.config import Resolved
from engine.core.errors import ConfigError, ControlError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.profiling import LayerTable, Peaks, RankLayers

SETTLE = 4
"""Steps before the timed ones."""
SKIP = 2
"""Steps under the profiler before those that count."""
SLACK = 8
"""Spare steps, so that no sequence finishes."""


@frozen(kw_only=True)
class Profiled:
    """Steps of one kind by layer."""

    title: str
    ranks: tuple[RankLayers, ...]
    step_us: float
    """us per step by the engine's clock, without the profiler."""
    profiled_us: float
    """us per step by the engine's clock, under the profiler."""


@configured(without=OFFLINE)
def layers(
    *,
    batch: Annotated[int, typer.Option(help="Sequences that decode.", min=1)] = 64,
    context: Annotated[int, typer.Option(help="Prompt tokens of each, which decoding adds to.", min=1)] = 512,
    steps: Annotated[int, typer.Option(help="Steps to profile.", min=1)] = 20,
    prefill: Annotated[
        int, typer.Option(help="Profile steps of prompts of this many tokens, too; 0: none.", min=0)
    ] = 0,
    by: Annotated[
        str,
        typer.Option(
            help="module: a line per module; kind: one for the same module of all layers; auto: kind from 9 layers on.",
            metavar="auto|module|kind",
        ),
    ] = "auto",
    depth: Annotated[
        int, typer.Option(help="Parts of modules' names that count, as 3 in model.layers.0; 0: all.", min=0)
    ] = 0,
    table: Annotated[
        Path | None, typer.Option("--csv", help="File to write the table to, as CSV.", metavar="FILE")
    ] = None,
    output: Json = None,
    resolved: Resolved,
) -> None:
    """Time, bytes and FLOPs of every layer in decode steps, and in prefill steps, next to what the device could."""
    if by not in ("auto", "module", "kind"):
        raise ConfigError(f"--by {by!r} is none of auto, module and kind")
    from engine.core.profiling import find_peaks, make_layer_table

    with opened(resolved.config) as engine:
        peaks = find_peaks(engine.config.roofline, engine.device, engine.cache_info.dtype)
        profiled = [profile_decode(engine, batch, context, steps)]
        if prefill:
            profiled.append(profile_prefill(engine, prefill, steps))
    chosen: Literal["module", "kind"] | None = {"module": "module", "kind": "kind"}.get(by)  # type: ignore[assignment]
    tables = [make_layer_table(one.ranks, peaks, by=chosen, depth=depth or None) for one in profiled]
    for one, made in zip(profiled, tables, strict=True):
        print_layers(one, made, peaks)
    if table is not None:
        _write_csv(table, profiled, tables)
    if output is not None:
        settings = engine_settings(engine) | {"batch": batch, "context": context, "steps": steps, "prefill": prefill}
        settings["tensor_parallel"] = engine.config.executor.tensor_parallel
        settings["peaks"] = None if peaks is None else attrs.asdict(peaks)
        found = [_as_json(one, made) for one, made in zip(profiled, tables, strict=True)]
        write(output, header("profile layers", engine.cache_info.device, settings) | {"tables": found})


def profile_decode(engine: Engine, batch: int, context: int, steps: int) -> Profiled:
    """Profile decode steps of `batch` sequences. Raises ConfigError if they cannot all decode at the same time."""
    limit = engine.config.scheduler.max_running
    if batch > limit:
        raise ConfigError(f"a batch of {batch} cannot run: at most {limit} sequences can; raise --max-running")
    budget = engine.config.scheduler.max_batch_tokens
    chunks = -(-batch * context // max(budget - batch, 1))  # steps in which the first sequences already decode
    outputs = chunks + SETTLE + 2 * steps + SKIP + 2 * SLACK
    if context + outputs > engine.max_len:
        raise ConfigError(
            f"--context {context} and {outputs} tokens that are decoded make more than the {engine.max_len} that a"
            " context can have; give a shorter --context or fewer --steps"
        )
    load = Load(name="", lengths=((context, outputs),) * batch)
    made = dict.fromkeys((f"layers-{number}" for number in range(batch)), 0)
    for request in load.requests(engine.vocab_size, "layers-"):
        engine.add(request)
    while min(made.values()) < SETTLE:
        for one in engine.step():
            made[one.request] += len(one.tokens)
            if one.finish_reason is not None:
                raise ConfigError(_not_all(batch))
    found = _profiled(engine, f"decode, {batch} sequences of {context} tokens on", steps)
    for request_id in made:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    if any((rank.decodes, rank.prefill_tokens) != ((batch,), (0,)) for rank in found.ranks):
        raise ConfigError(_not_all(batch))
    return found


def _not_all(batch: int) -> str:
    return (
        f"not all of the {batch} sequences decoded in every step: the KV cache has no room for all at the same time;"
        " give a smaller --batch or --context, or a larger cache (--kv-memory)"
    )


def profile_prefill(engine: Engine, length: int, steps: int) -> Profiled:
    """Profile steps that compute prompts of `length` tokens, as many as fit into a step."""
    if length + 1 > engine.max_len:
        raise ConfigError(f"--prefill {length} is more than a context can have, {engine.max_len}; give a smaller one")
    budget, limit = engine.config.scheduler.max_batch_tokens, engine.config.scheduler.max_running
    each = max(1, min(-(-budget // length), limit))
    count = -(-(SETTLE + 2 * steps + SKIP + SLACK) * min(budget, each * length) // length) + each
    load = Load(name="", lengths=((length, 1),) * count)
    for request in load.requests(engine.vocab_size, "layers-prefill-"):
        engine.add(request)
    for _ in range(SETTLE):
        engine.step()
    found = _profiled(engine, f"prefill, prompts of {length} tokens", steps)
    for number in range(count):
        engine.abort(f"layers-prefill-{number}")
    while engine.has_work:
        engine.step()
    if any(count for rank in found.ranks for count in rank.decodes):
        raise ConfigError("the scheduler decodes in steps that compute prompts; the steps are not of one kind")
    return found


def _profiled(engine: Engine, title: str, steps: int) -> Profiled:
    """Time `steps` steps without the profiler, then profile as many."""
    import msgspec

    from engine.core.profiling import LayerRow, RankLayers

    def timed(count: int) -> float:
        """us per step, from result to result."""
        _step(engine)
        begin = time.perf_counter()
        for _ in range(count):
            _step(engine)
        return (time.perf_counter() - begin) / count * 1e6

    plain = timed(steps)
    try:
        engine.call("start_layers", {"skip": SKIP})
        for _ in range(SKIP):
            _step(engine)
        under = timed(steps)
        answers = engine.call("stop_layers")
    except ControlError:
        engine.call("stop_layers", {"discard": True})
        raise
    ranks = [msgspec.convert(answer, RankLayers) for answer in answers]
    while len(ranks[0].rows) < ranks[0].num_rows:
        more = engine.call("read_layers", {"start": len(ranks[0].rows)})
        for rank, rows in zip(ranks, more, strict=True):
            rank.rows.extend(msgspec.convert(rows, list[LayerRow]))
    say(f"profiled {title}")
    return Profiled(title=title, ranks=tuple(ranks), step_us=plain, profiled_us=under)


def _step(engine: Engine) -> None:
    """Run a step. Raises ConfigError if there is nothing left to compute."""
    if not engine.has_work:
        raise ConfigError("the load ended before all steps were profiled: more tokens per step; give fewer --steps")
    engine.step()


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
    typer.echo(
        f"us per step: {table.sum_us:,.1f} sum of the table; {profiled.profiled_us:,.1f} by the engine's clock"
        f" ({table.sum_us / profiled.profiled_us - 1:+.1%}), {profiled.step_us:,.1f} without the profiler"
        f" ({table.sum_us / profiled.step_us - 1:+.1%})"
    )
    graphs = [f"{key} ({count})" for key, count in profiled.ranks[0].graphs if key]
    if graphs:
        typer.echo(f"CUDA graphs, with the number of steps: {'; '.join(graphs)}")
    if uncounted := profiled.ranks[0].uncounted:
        typer.echo(f"FLOPs that are not known, and so not counted: {', '.join(uncounted)}")
    if peaks is None:
        typer.echo(
            "no floors: the device's peaks are not known; give --peak-bandwidth and --peak-flops, as `engine bench"
            " latency` measures them"
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


def _write_csv(path: Path, profiled: Sequence[Profiled], tables: Sequence[LayerTable]) -> None:
    """Write the lines of all tables as one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("steps", "rank", *FIELDS, *DERIVED))
        writer.writeheader()
        for one, table in zip(profiled, tables, strict=True):
            for line in table.lines:
                writer.writerow({"steps": one.title, "rank": table.rank, **_cells(line)})
    say(f"written to {path}")


def _as_json(profiled: Profiled, table: LayerTable) -> dict[str, Any]:
    return {
        "title": profiled.title,
        "steps": table.steps,
        "rank": table.rank,
        "step_us": table.step_us,
        "sum_us": table.sum_us,
        "engine_clock_us": profiled.profiled_us,
        "without_profiler_us": profiled.step_us,
        "graphs": dict(profiled.ranks[0].graphs),
        "bytes": table.bytes,
        "flops": table.flops,
        "floor_us": table.floor_us,
        "ranks": [attrs.asdict(one) for one in table.ranks],
        "lines": [_cells(line) for line in table.lines],
    }
