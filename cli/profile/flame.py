"""`engine profile flame`: a flame graph of every process of a running server, in one HTML file."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.bench.load import say
from engine.cli.bench.report import Json, Row, report, write
from engine.cli.output_file import output_file
from engine.cli.processes import Process, thread_cpu_seconds
from engine.cli.profile.flame_page import flame_page
from engine.cli.profile.py_spy import Sampling, find_py_spy, record
from engine.cli.profile.sampled import Sampled, waits_for
from engine.cli.profile.target import Pid, Url, processes_of
from engine.cli.tables import print_table
from engine.core.errors import ExecutorError

TOP = 15
"""Functions in the printed table, of each process."""
BUSY = 0.05
"""Threads that use less of a core are not in the printed table."""

ThreadUse = Mapping[tuple[str, int, str], float]
"""(role, thread ID, name of the thread) -> share of a core."""


def flame(
    *,
    url: Url = "",
    pid: Pid = 0,
    seconds: Annotated[int, typer.Option(help="Seconds to sample.", min=1)] = 10,
    rate: Annotated[int, typer.Option(help="Samples per second and thread.", min=1, max=1000)] = 100,
    idle: Annotated[bool, typer.Option("--idle", help="Sample threads that sleep too.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Show frames of C and C++; stops each process for each sample.")
    ] = False,
    pause: Annotated[
        bool, typer.Option("--pause", help="Stop each process for each sample, so that no stack is torn.")
    ] = False,
    html: Annotated[
        Path, typer.Option("--output", help="File for the flame graphs.", metavar="FILE", callback=output_file)
    ] = Path("flame.html"),
    output: Json = None,
) -> None:
    """Sample the Python stacks of all processes of a running server at the same time, by py-spy."""
    find_py_spy()
    processes = processes_of(url, pid)
    sampling = Sampling(seconds=seconds, rate=rate, idle=idle, native=native, pause=pause)
    say(f"sampling {len(processes)} processes for {seconds} s")
    before, begin = _thread_times(processes), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="engine-flame-") as directory:
        raw = record(processes, sampling, Path(directory))
    elapsed = time.monotonic() - begin
    used = {thread: (after - before.get(thread, 0.0)) / elapsed for thread, after in _thread_times(processes).items()}
    sampled = {role: Sampled.of(text) for role, text in raw.items()}
    if not any(one.samples for one in sampled.values()):
        raise ExecutorError("no thread ran Python code in this time; send requests meanwhile, or add --idle")
    kind = f"{'all threads' if idle else 'running threads'}, {seconds} s at {rate} Hz"
    html.write_text(flame_page(f"{kind}: {', '.join(sampled)}", sampled), encoding="utf-8")
    _print(sampled, used, idle=idle)
    say(f"written to {html}")
    if output is not None:
        settings = {"seconds": seconds, "rate": rate, "idle": idle, "native": native, "pause": pause}
        write(output, report("profile flame", kind, list(_rows(sampled, used)), settings))


def _thread_times(processes: list[Process]) -> dict[tuple[str, int, str], float]:
    """CPU seconds of all threads, by (role, thread ID, name)."""
    return {
        (process.role, *thread): seconds
        for process in processes
        for thread, seconds in thread_cpu_seconds(process.pid).items()
    }


def _print(sampled: Mapping[str, Sampled], used: ThreadUse, *, idle: bool) -> None:
    """Print the tops of the stacks, the shares of waiting, and the threads by CPU time."""
    total = sum(one.samples for one in sampled.values())
    for role, one in sampled.items():
        rows = [
            (name, count, f"{count / one.samples:.1%}", f"{count / total:.1%}", waits_for(name))
            for name, count in one.top().most_common(TOP)
        ]
        if rows:
            columns = ("top of the stack", "samples", "of the process", "of all", "waits for")
            print_table(columns, rows, title=f"{role}: {one.samples} samples")
    waits: Counter[str] = sum((one.waits() for one in sampled.values()), Counter())
    state = "asleep or spinning" if idle else "spinning, or entering or leaving a wait"
    waiting = [(name, count, f"{count / total:.1%}") for name, count in waits.most_common()]
    waiting.append(("all together", waits.total(), f"{waits.total() / total:.1%}"))
    print_table(("waits for", "samples", "of all"), waiting, title=f"Waiting ({state})")
    threads = [
        (f"{role}: {name}", number, f"{share:.0%}")
        for (role, number, name), share in sorted(used.items(), key=lambda item: -item[1])
        if share >= BUSY
    ]
    print_table(("thread", "id", "of a core"), threads, title="CPU time of threads, with those that run no Python")


def _rows(sampled: Mapping[str, Sampled], used: ThreadUse) -> Iterator[Row]:
    """The figures as rows of a report."""
    total = sum(one.samples for one in sampled.values())
    for role, one in sampled.items():
        yield Row(metric="samples", case=role, value=one.samples, unit="")
        for name, count in one.top().most_common(TOP):
            yield Row(metric="top of the stack", case=f"{role}: {name}", value=count / total, unit="of all samples")
        for name, count in one.modules().most_common(TOP):
            yield Row(metric="module", case=f"{role}: {name}", value=count / total, unit="of all samples")
        for name, count in one.waits().items():
            yield Row(metric="waiting", case=f"{role}: {name}", value=count / total, unit="of all samples")
    for (role, number, name), share in used.items():
        if share >= BUSY:
            yield Row(metric="CPU time of a thread", case=f"{role}: {name} {number}", value=share, unit="of a core")
