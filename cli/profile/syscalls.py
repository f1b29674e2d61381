"""`engine profile syscalls`: system calls of all processes of a running server by name, by strace."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from engine.cli.bench.load import say
from engine.cli.bench.report import Json, Row, report, write
from engine.cli.processes import Process
from engine.cli.profile.target import PTRACE_ADVICE, Pid, Url, processes_of
from engine.cli.tables import print_table
from engine.core.errors import ConfigError, ExecutorError

TOP = 12
"""System calls in the printed table, of each process."""
STOP_SECONDS = 20
"""Time that strace may take to detach."""
LINE = re.compile(r"\s*[\d.]+\s+([\d.]+)\s+\d+\s+(\d+)\s+(?:(\d+)\s+)?(\w+)\s*")
"""A line of strace's summary: % time, seconds, usecs/call, calls, errors, name."""


@frozen
class Calls:
    """All calls of one name by one process."""

    number: int
    errors: int
    seconds: float
    """Time in the kernel."""


def syscalls(
    *,
    url: Url = "",
    pid: Pid = 0,
    seconds: Annotated[float, typer.Option(help="Seconds to count.", min=0.1)] = 5.0,
    output: Json = None,
) -> None:
    """Count the system calls of each process by name. Slows the server down, by some microseconds per call."""
    program = shutil.which("strace")
    if program is None:
        raise ConfigError("strace is not installed; install the package strace of this system")
    processes = processes_of(url, pid)
    say(f"counting the system calls of {len(processes)} processes for {seconds:g} s")
    found = count(program, processes, seconds)
    for role, calls in found.items():
        rows = [
            (name, f"{one.number / seconds:,.0f}", one.errors or "", f"{one.seconds / one.number * 1e6:.0f}")
            for name, one in sorted(calls.items(), key=lambda item: -item[1].number)[:TOP]
        ]
        columns = ("system call", "per second", "errors", "us in the kernel per call")
        print_table(
            columns, rows, title=f"{role}: {sum(one.number for one in calls.values()) / seconds:,.0f} per second"
        )
    if output is not None:
        write(output, report("profile syscalls", f"{seconds:g} s", list(_rows(found, seconds)), {"seconds": seconds}))


def count(program: str, processes: list[Process], seconds: float) -> dict[str, dict[str, Calls]]:
    """Run strace on all processes at the same time; the calls by role and name. Raises ConfigError or ExecutorError."""
    running = []
    with tempfile.TemporaryDirectory(prefix="engine-strace-") as directory:
        try:
            for process in processes:
                file = Path(directory) / str(process.pid)
                command = [program, "-c", "-f", "-q", "-o", str(file), "-p", str(process.pid)]
                running.append((process, file, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
            time.sleep(seconds)
            found = {}
            for _, _, strace in running:
                strace.send_signal(signal.SIGINT)  # detaches, and writes the summary
            for process, file, strace in running:
                _, errors = strace.communicate(timeout=STOP_SECONDS)
                text = file.read_text(encoding="utf-8") if file.exists() else ""
                if not text and "attach" in errors:
                    raise _refused(process, errors)
                found[process.role] = parse(text)
        except subprocess.TimeoutExpired:
            raise ExecutorError(f"strace did not end within {STOP_SECONDS} s") from None
        finally:
            for _, _, strace in running:
                strace.kill()
                strace.communicate()
    return found


def parse(summary: str) -> dict[str, Calls]:
    """The calls in strace's summary, by name."""
    matches = (LINE.fullmatch(line) for line in summary.splitlines())
    return {
        match[4]: Calls(int(match[2]), int(match[3] or 0), float(match[1]))
        for match in matches
        if match is not None and match[4] != "total"
    }


def _refused(process: Process, errors: str) -> ConfigError:
    """The error for a process that strace cannot attach to."""
    said = errors.strip().splitlines()[0]
    return ConfigError(f"strace may not trace {process.role} (process {process.pid}): {PTRACE_ADVICE} ({said})")


def _rows(found: Mapping[str, Mapping[str, Calls]], seconds: float) -> Iterator[Row]:
    """The figures as rows of a report."""
    for role, calls in found.items():
        for name, one in calls.items():
            yield Row(metric="system calls", case=f"{role}: {name}", value=one.number / seconds, unit="per second")
