"""The processes of a server as /proc shows them (Linux): roles, memory, descriptors, threads, leftovers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wire import UsageError

KIB = 1024


@dataclass(frozen=True)
class Process:
    """A process of the server."""

    pid: int
    role: str
    """supervisor, front end, engine or worker; with a number where there are several: in the order of their start."""


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
    inodes = set()
    for name in ("tcp", "tcp6"):
        for line in _read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listening
                inodes.add(f"socket:[{fields[9]}]")
    holders = [pid for pid in _all_pids() if inodes & set(_links(pid))]
    for pid in holders:
        if parent_of(pid) not in holders:
            return pid
    raise UsageError(f"no process of this user listens on port {port}; give the server's process ID with --pid")


def family(supervisor: int) -> list[Process]:
    """The supervisor and its descendants."""
    parents = {pid: parent_of(pid) for pid in _all_pids()}
    known = {supervisor: "supervisor"} if supervisor in parents else {}
    found: list[tuple[int, str]] = list(known.items())
    while more := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        for pid in sorted(more):
            known[pid] = _role(pid, known[parents[pid]])
            found.append((pid, known[pid]))
    counts = Counter(role for _, role in found)
    numbers: Counter[str] = Counter()
    named = []
    for pid, role in found:
        named.append(Process(pid, f"{role} {numbers[role]}" if counts[role] > 1 else role))
        numbers[role] += 1
    return named


def _role(pid: int, parent: str) -> str:
    """The role of a process, from its command line and its parent's role."""
    words = _read(f"/proc/{pid}/cmdline")
    if "front_end" in words:
        return "front end"
    return "engine" if parent == "supervisor" else "worker" if "executors" in words else "helper"


def usage(pid: int) -> Usage | None:
    """What a process uses; None when it has ended."""
    fields = dict(re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", _read(f"/proc/{pid}/status"), re.MULTILINE))
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
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split(" ")[1] if Path(f"/proc/{pid}").exists() else ""


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that still run."""
    return [pid for pid in pids if state_of(pid) not in ("", "Z", "X")]


def parent_of(pid: int) -> int:
    """Process ID of the parent; 0 when there is no such process."""
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(stat[1]) if len(stat) > 1 else 0


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
        """What was not there before."""
        shared = sorted(f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory)
        return [*shared, *sorted(self.directories - before.directories)]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _links(pid: int) -> list[str]:
    """What the descriptors of a process are; nothing for processes of others."""
    try:
        return [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _read(path: str) -> str:
    """A file of /proc; empty when the process has ended."""
    try:
        return Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
