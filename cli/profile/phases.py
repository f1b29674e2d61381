"""`engine profile phases`: the time of a server by phase and process, as shares of a step and of a request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from engine.cli.bench.load import say
from engine.cli.bench.report import Json, Row, report, write
from engine.cli.metrics.scrape import Interval, scrape
from engine.cli.metrics.shares import WHAT, PhaseShare, counts, of_request, of_step, three_shares
from engine.cli.opening import located
from engine.cli.options import configured, refuse_settings
from engine.cli.profile.target import Pid, Url, is_local, processes_of
from engine.cli.tables import print_table
from engine.core.config import Resolved
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.cli.bench.server_process import Server
    from engine.cli.processes import Process

REPORTED = {"HTTP": 33, "scheduling": 29, "device": 38}
"""Percent, as reported for vLLM 0.6.0 (Llama 3 8B on an H100), for comparison."""
NO_SLO = (None, None)
"""The load has no service level objective."""


@configured()
def phases(
    *,
    url: Url = "",
    pid: Pid = 0,
    seconds: Annotated[float, typer.Option(help="With --url: seconds to watch the server.", min=0.1)] = 10.0,
    concurrency: Annotated[int, typer.Option(help="Without --url: concurrent requests of the load.", min=1)] = 16,
    requests: Annotated[
        int, typer.Option(help="Without --url: requests of the load; 0: eight per concurrent one.", min=0)
    ] = 0,
    input_len: Annotated[int, typer.Option(help="Prompt tokens per request, about: prompts are texts.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens per request.", min=1)] = 128,
    output: Json = None,
    resolved: Resolved,
) -> None:
    """The time of each phase of a step and of a request, in a running server or in one that the command starts."""
    from engine.cli.bench.serve import LoadLevel, apply_load, processes_for, served_config, vocab_size
    from engine.cli.bench.server_process import Server, first_api_key, running

    if url:
        refuse_settings(resolved, but=("model.path",))
        key = first_api_key(resolved.config)
        server = Server.at(url, key, None)
        processes = processes_of(url, pid) if pid or is_local(url) else []
        say(f"watching {url} for {seconds:g} s")
        before = scrape(server.host, server.port, key, processes)
        time.sleep(seconds)
        interval = Interval(before, scrape(server.host, server.port, key, processes))
        _finish(server, interval, processes, f"the server at {url}", output, {})
        return
    if pid:
        raise ConfigError("--pid needs --url; the process of a server started here is known")
    resolved = located(resolved)
    config = served_config(resolved)
    config = attrs.evolve(config, server=attrs.evolve(config.server, phase_times=True))
    key = first_api_key(config)
    count = requests or 8 * concurrency
    load = LoadLevel(
        concurrency=concurrency,
        requests=count,
        input_len=input_len,
        output_len=output_len,
        vocab_size=vocab_size(config),
        processes=processes_for(concurrency),
        seed=1,
        timeout=600.0,
        text=True,
    )
    with running(config) as server:
        processes = processes_of("", server.pid or 0)
        apply_load(
            server, attrs.evolve(load, requests=concurrency, output_len=min(16, output_len), seed=0), key, NO_SLO
        )
        before = scrape(server.host, server.port, key, processes)
        level = apply_load(server, load, key, NO_SLO)
        interval = Interval(before, scrape(server.host, server.port, key, processes))
    say(f"{load.name}: {level.output_rate:,.0f} output tokens/s")
    settings = {"concurrency": concurrency, "requests": count, "input_len": input_len, "output_len": output_len}
    _finish(server, interval, processes, f"{load.name}, {input_len} in / {output_len} out", output, settings)


def _finish(
    server: Server,
    interval: Interval,
    processes: list[Process],
    what: str,
    output: Json,
    settings: Mapping[str, object],
) -> None:
    """Print the tables and write the report. Raises ConfigError if the server computed nothing."""
    steps, requests, tokens = counts(interval)
    if not steps:
        raise ConfigError("the server ran no step in this time; send requests meanwhile, or give more --seconds")
    step, request = of_step(interval), of_request(interval)
    _print(f"A step ({steps:,.0f} steps, {tokens:,.0f} tokens, {interval.seconds:.1f} s)", step, steps, "step")
    if requests:
        _print(f"A request ({requests:,.0f} finished)", request, requests, "request")
    else:
        say("no request finished in this time, so there is no table of a request")
    shares = three_shares(interval)
    if not any(row.process == "front end" for row in request):
        say("the front ends do not measure their phases; start the server with --set server.phase_times=true")
    if shares is None:
        say("without the front ends' phases, and without /proc on the server's machine, the share of HTTP is not known")
    else:
        rows = [(name, f"{share:.1%}", f"{REPORTED[name]} %") for name, share in shares.shares.items()]
        print_table(("share", "here", "reported for vLLM 0.6"), rows, title="HTTP, scheduling, device")
    if interval.cpu:
        pids = {one.role: one.pid for one in processes}
        cpu = [
            (role, pids[role], f"{used:.2f}", f"{used / interval.seconds:.0%}") for role, used in interval.cpu.items()
        ]
        print_table(("process", "pid", "CPU s", "of a core"), cpu, title="CPU time of each process")
    _print_collections(interval)
    if output is not None:
        write(
            output,
            report("profile phases", what, list(_rows(interval, step, request)), {"model": server.model, **settings}),
        )


def _print(title: str, rows: list[PhaseShare], number: float, per: str) -> None:
    """Print a table of phases."""
    cells = [
        (
            one.phase if one.share is not None else f"  {one.phase}",
            one.process,
            f"{one.seconds / number * 1e3:.3f}",
            "" if one.share is None else f"{one.share:.1%}",
            WHAT.get(one.phase, ""),
        )
        for one in rows
    ]
    print_table(("phase", "process", f"ms per {per}", "share", "what"), cells, title=title)


def _print_collections(interval: Interval) -> None:
    """Print the garbage collections by process and generation."""
    rows = []
    for process, name, labels in _collectors(interval):
        for generation in "012":
            number = interval.total(f"{name}_count", generation=generation, **labels)
            if number:
                pause = interval.total(f"{name}_sum", generation=generation, **labels)
                share = f"{pause / interval.seconds:.2%}"
                rows.append((process, generation, f"{number:.0f}", f"{pause / number * 1e3:.2f}", share))
    if rows:
        columns = ("process", "generation", "collections", "mean pause, ms", "of the time")
        print_table(columns, rows, title="Garbage collections")


def _collectors(interval: Interval) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(process, metric, labels) of the garbage collections of each kind of process."""
    yield "front end", "engine_front_end_gc_seconds", {}
    for process in interval.by("engine_gc_seconds_count", "process"):
        yield process, "engine_gc_seconds", {"process": process}


def _rows(interval: Interval, step: list[PhaseShare], request: list[PhaseShare]) -> Iterator[Row]:
    """The figures as rows of a report."""
    steps, requests, _ = counts(interval)
    for number, per, rows in ((steps, "step", step), (requests, "request", request)):
        for one in rows if number else ():
            case = f"{one.process}: {one.phase}"
            yield Row(metric=f"time per {per}", case=case, value=one.seconds / number * 1e3, unit="ms")
            if one.share is not None:
                yield Row(metric=f"share of a {per}", case=case, value=one.share, unit="")
    if (shares := three_shares(interval)) is not None:
        for name, share in shares.shares.items():
            yield Row(metric="share", case=name, value=share, unit="")
    for role, used in interval.cpu.items():
        yield Row(metric="CPU cores", case=role, value=used / interval.seconds, unit="cores")
    for process, name, labels in _collectors(interval):
        pause = interval.total(f"{name}_sum", **labels)
        yield Row(metric="garbage collection", case=process, value=pause / interval.seconds, unit="of the time")
