"""`engine profile allocations`: the lines that allocate memory while an offline load runs, by tracemalloc."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import frozen

from engine.cli.bench.load import make_load, opened, parse_range, run_load, say
from engine.cli.bench.report import Json, Row, engine_settings, report, write
from engine.cli.opening import located
from engine.cli.options import OFFLINE, configured
from engine.cli.profile.sampled import path_in_package
from engine.cli.tables import print_table
from engine.core.config import Resolved

if TYPE_CHECKING:
    from tracemalloc import Snapshot, StatisticDiff

    from engine.core.engine import Engine
    from engine.core.types import Request

TOP = 20
"""Lines in each table."""


@frozen
class Line:
    """What one line of code has allocated and not freed between two moments."""

    place: str
    bytes: int
    blocks: int


@frozen(kw_only=True)
class Growth:
    """What has grown between two moments of a load."""

    title: str
    lines: Sequence[Line]
    steps: int
    requests: int


@configured(without=OFFLINE)
def allocations(
    *,
    requests: Annotated[int, typer.Option(help="Requests of the load.", min=1)] = 32,
    input_len: Annotated[str, typer.Option(help="Prompt tokens per request, as 128 or 16-256.")] = "128",
    output_len: Annotated[str, typer.Option(help="Output tokens per request, as 64 or 16-256.")] = "64",
    frames: Annotated[int, typer.Option(help="Frames of each allocation's stack.", min=1, max=25)] = 1,
    output: Json = None,
    resolved: Resolved,
) -> None:
    """Lines of code by the memory they allocate and keep, while requests run and after they have ended.

    Runs the load in this process. Tracing slows Python down, so no times are measured.
    """
    inputs, outputs = parse_range(input_len, "--input-len"), parse_range(output_len, "--output-len")
    load = make_load(requests, inputs, outputs)
    with opened(located(resolved).config) as engine:
        run_load(engine, load, prefix="first-")  # what is made once is not growth
        say(f"tracing the allocations of {load.name}")
        prompts = load.prompts(engine.vocab_size, "traced-")
        growths = traced(engine, [*load.requests(engine.vocab_size, "traced-", prompts=prompts)], frames)
        settings = engine_settings(engine)
    for one in growths:
        columns = ("line", "KiB", "blocks", "bytes per step", "bytes per request")
        print_table(columns, [_cells(line, one) for line in one.lines[:TOP]], title=one.title)
    if output is not None:
        write(output, report("profile allocations", load.name, list(_rows(growths)), settings))


def traced(engine: Engine, requests: Sequence[Request], frames: int) -> list[Growth]:
    """Run requests while tracemalloc traces: what has grown halfway, and what is left after the last has ended."""
    import gc
    import tracemalloc

    tracemalloc.start(frames)
    try:
        gc.collect()
        before, first = tracemalloc.take_snapshot(), engine.stats()
        for request in requests:
            engine.add(request)
        tokens = sum(request.params.max_tokens or 0 for request in requests) // 2
        while engine.has_work and engine.stats().generation_tokens - first.generation_tokens < tokens:
            engine.step()
        halfway, middle = tracemalloc.take_snapshot(), engine.stats()
        while engine.has_work:
            engine.step()
        gc.collect()
        after, last = tracemalloc.take_snapshot(), engine.stats()
    finally:
        tracemalloc.stop()
    number = len(requests)
    return [
        Growth(
            title=f"Kept halfway ({number} requests, {middle.steps - first.steps} steps)",
            lines=_lines(before, halfway),
            steps=middle.steps - first.steps,
            requests=number,
        ),
        Growth(
            title=f"Left after all requests have ended ({number} requests, {last.steps - first.steps} steps)",
            lines=_lines(before, after),
            steps=last.steps - first.steps,
            requests=number,
        ),
    ]


def _lines(before: Snapshot, after: Snapshot) -> list[Line]:
    """The lines that have grown, the one that has grown most first; without tracemalloc's own."""
    found = [_line(one) for one in after.compare_to(before, "lineno") if one.size_diff > 0]
    found = [one for one in found if not one.place.startswith(("tracemalloc.py", "engine/cli/"))]
    return sorted(found, key=lambda one: -one.bytes)


def _line(difference: StatisticDiff) -> Line:
    frame = difference.traceback[0]
    place = f"{path_in_package(frame.filename)}:{frame.lineno}"
    return Line(place, difference.size_diff, difference.count_diff)


def _cells(line: Line, growth: Growth) -> tuple[object, ...]:
    per_step = f"{line.bytes / max(1, growth.steps):,.0f}"
    return line.place, f"{line.bytes / 1024:,.1f}", line.blocks, per_step, f"{line.bytes / growth.requests:,.0f}"


def _rows(growths: Sequence[Growth]) -> Iterator[Row]:
    """The figures as rows of a report."""
    for growth in growths:
        for line in growth.lines[:TOP]:
            yield Row(metric=growth.title, case=line.place, value=line.bytes, unit="bytes")
