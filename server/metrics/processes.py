"""What the server's processes use, as /proc shows it (Linux)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
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


class ProcessReader:
    """Reads what the server's processes use."""

    def __init__(self, supervisor: int, proc: Path = PROC) -> None:
        """supervisor: process ID; 0: there is none."""
        self._supervisor = supervisor
        self._proc = proc
        self._workers: dict[int, list[int]] = {}
        """Process ID of each engine -> those of its workers, which live as long as the engine."""

    def read(self, front_ends: Iterable[int], engines: Iterable[int]) -> list[Process]:
        """The processes that run; none where there is no /proc.

        The arguments are process IDs, 0 for a process that has not started. Costs about 0.1 ms per process, and once
        per engine process 10 us per thread, to find its workers.
        """
        wanted = [("supervisor", "0", self._supervisor)]
        wanted += [("front_end", str(row), pid) for row, pid in enumerate(front_ends)]
        known, self._workers = self._workers, {}
        for replica, pid in enumerate(engines):
            wanted.append(("engine", str(replica), pid))
            if pid:
                workers = self._workers[pid] = known[pid] if pid in known else _workers(self._proc, pid)
                wanted += [("worker", f"{replica}.{number}", worker) for number, worker in enumerate(workers)]
        boot = _boot_time(self._proc)
        found = (_read(self._proc, boot, role, number, pid) for role, number, pid in wanted if pid)
        return [process for process in found if process is not None]


def program(pid: int, proc: Path = PROC) -> str:
    """What the Python of a process runs, a module or the path of a script; empty when the process has ended."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((word for word in words[1:] if word and not word.startswith("-")), "")


def is_worker(pid: int, proc: Path = PROC) -> bool:
    """Whether a child of an engine process is a worker of its executor, not a helper such as the compile server."""
    return "executors" in program(pid, proc)


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


def _workers(proc: Path, pid: int) -> list[int]:
    """Process IDs of the workers that any thread of an engine process has started, in the order of their start."""
    found: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in (proc / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended, or the kernel does not list children
                found += map(int, (thread / "children").read_text().split())
    return sorted(child for child in found if is_worker(child, proc))


def _boot_time(proc: Path) -> float:
    """When the system started, time.time(); 0 where there is no /proc."""
    try:
        found = re.search(r"^btime (\d+)", (proc / "stat").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(found[1]) if found else 0.0
