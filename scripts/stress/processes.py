"""What the processes of a server use, as /proc shows it (Linux): memory, descriptors, threads, leftovers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wire import UsageError

from engine.cli import processes
from engine.cli.processes import Process, family, read_proc
from engine.core.errors import ConfigError

__all__ = ["Leftovers", "Process", "Usage", "alive", "family", "find_supervisor", "state_of", "usage"]

KIB = 1024


@dataclass(frozen=True)
class Usage:
    """What a process uses at one moment."""

    memory: int
    """Resident memory without pages of files, bytes: the system drops such pages and reads them again as it likes."""
    descriptors: int
    threads: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


def find_supervisor(port: int) -> int:
    """Process ID of the server that listens on a port of this machine. Raises UsageError."""
    try:
        return processes.find_supervisor(port)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def usage(pid: int) -> Usage | None:
    """What a process uses; None when it has ended."""
    fields = dict(re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", read_proc(f"/proc/{pid}/status"), re.MULTILINE))
    if len(fields) < 3:
        return None
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    memory = (int(fields["RssAnon"]) + int(fields["RssShmem"])) * KIB
    return Usage(memory, descriptors, int(fields["Threads"]))


def state_of(pid: int) -> str:
    """State of a process: R, S, T (stopped), Z (exited and not reaped) ...; empty when there is none."""
    return read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split(" ")[1] if Path(f"/proc/{pid}").exists() else ""


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that still run."""
    return [pid for pid in pids if state_of(pid) not in ("", "Z", "X")]


@dataclass(frozen=True)
class Leftovers:
    """Names that outlive a process: in /dev/shm, and the servers' own directories."""

    shared_memory: frozenset[str]
    directories: frozenset[str]

    @classmethod
    def now(cls, temporary: Path) -> Leftovers:
        """temporary: the server's TMPDIR."""
        names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
        return cls(frozenset(names), frozenset(path.name for path in temporary.glob("engine-*")))

    def beyond(self, before: Leftovers) -> list[str]:
        """Names that were not there before."""
        shared = sorted(f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory)
        return [*shared, *sorted(self.directories - before.directories)]
