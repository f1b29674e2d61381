"""The processes of a running server, found in /proc (Linux): roles and CPU time."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from engine.core.errors import ConfigError
from engine.server.metrics.processes import is_worker, program


@frozen
class Process:
    """A process of a server."""

    pid: int
    role: str
    """supervisor, front end, engine or worker; with a number where there are several: in the order of their start."""


def find_supervisor(port: int) -> int:
    """Process ID of the server that listens on a port of this machine. Raises ConfigError."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        for line in read_proc(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listening
                inodes.add(f"socket:[{fields[9]}]")
    holders = [pid for pid in _all_pids() if inodes & set(_links(pid))]
    for pid in holders:
        if parent_of(pid) not in holders:
            return pid
    raise ConfigError(f"no process of this user listens on port {port}; give the server's process ID with --pid")


def family(supervisor: int) -> list[Process]:
    """The supervisor and its descendants; empty when there is no such process."""
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


def parent_of(pid: int) -> int:
    """Process ID of the parent; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def own_cpu_seconds(pid: int) -> float:
    """CPU seconds used so far by one process; 0 when it has ended."""
    return _cpu_seconds(read_proc(f"/proc/{pid}/stat"))


def thread_cpu_seconds(pid: int) -> dict[tuple[int, str], float]:
    """CPU seconds used so far by each thread of a process, by (thread ID, name); empty when the process has ended."""
    found = {}
    with suppress(FileNotFoundError):
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):
            text = read_proc(f"/proc/{pid}/task/{tid}/stat")
            found[tid, text.partition("(")[2].rpartition(")")[0]] = _cpu_seconds(text)
    return found


def read_proc(path: str) -> str:
    """A file of /proc, with spaces for zero bytes; empty when the process has ended or is another user's."""
    try:
        return Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _role(pid: int, parent: str) -> str:
    """The role of a process, from the program that it runs and its parent's role."""
    if "front_end" in program(pid):
        return "front end"
    return "engine" if parent == "supervisor" else "worker" if is_worker(pid) else "helper"


def _cpu_seconds(stat: str) -> float:
    """CPU seconds in the text of a file named stat; 0 for an empty text."""
    fields = stat.rpartition(")")[2].split()
    # proc(5): after the name in parentheses come state, ppid, ...; utime and stime are fields 14 and 15.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty when there is no such process."""
    return read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _links(pid: int) -> list[str]:
    """What the descriptors of a process link to; empty for another user's process."""
    links = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed since
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass
    return links
