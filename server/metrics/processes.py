"""What the server's processes use, as /proc shows it (Linux)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

PROC = Path("/proc")
_MAX_FILES = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


@frozen(kw_only=True)
class Process:
    """A process of the server, and what it uses."""

    role: str
    """supervisor, front_end, engine or worker."""
    number: str
    """Which of its role, from "0" on: the row of a front end, the replica of an engine; of a worker both its replica
    and its place among the replica's workers, in the order of their start, as "0.1"."""
    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    descriptors: int
    max_descriptors: int
    threads: int
    started: float
    """time.time()."""


def read_processes(
    supervisor: int, front_ends: Iterable[int], engines: Iterable[int], proc: Path = PROC
) -> list[Process]:
    """The server's processes that run; none where there is no /proc.

    The arguments are process IDs, 0 for a process that has not started. Costs about 0.1 ms per process.
    """
    wanted = [("supervisor", "0", supervisor)]
    wanted += [("front_end", str(row), pid) for row, pid in enumerate(front_ends)]
    for replica, pid in enumerate(engines):
        wanted.append(("engine", str(replica), pid))
        workers = enumerate(_children(proc, pid)) if pid else ()
        wanted += [("worker", f"{replica}.{number}", worker) for number, worker in workers]
    boot = _boot_time(proc)
    found = (_read(proc, boot, role, number, pid) for role, number, pid in wanted if pid)
    return [process for process in found if process is not None]


def _read(proc: Path, boot: float, role: str, number: str, pid: int) -> Process | None:
    """One process; None when it has ended. boot: when the system started, time.time()."""
    directory = proc / str(pid)
    try:
        fields = (directory / "stat").read_text().rpartition(")")[2].split()
        descriptors = len(os.listdir(directory / "fd"))
        limit = _MAX_FILES.search((directory / "limits").read_text())
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Process(
        role=role,
        number=number,
        cpu_seconds=(int(fields[11]) + int(fields[12])) / ticks,
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        virtual_bytes=int(fields[20]),
        descriptors=descriptors,
        max_descriptors=int(limit[1]) if limit else 0,
        threads=int(fields[17]),
        started=boot + int(fields[19]) / ticks,
    )


def _children(proc: Path, pid: int) -> Iterator[int]:
    """Process IDs of the children that the main thread of a process has started, oldest first."""
    try:
        yield from map(int, (proc / str(pid) / "task" / str(pid) / "children").read_text().split())
    except OSError:  # the process has ended, or the kernel does not list children
        return


def _boot_time(proc: Path) -> float:
    """When the system started, time.time(); 0 where there is no /proc."""
    try:
        found = re.search(r"^btime (\d+)", (proc / "stat").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(found[1]) if found else 0.0
