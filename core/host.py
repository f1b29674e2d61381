"""What this process may use of its machine: cores and memory, within affinity and control groups (v1 and v2).

Without /proc, as on macOS, the machine's own numbers count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

NO_LIMIT = sys.maxsize


@frozen
class Host:
    """The machine, read from the file system below `root`."""

    root: Path = Path("/")

    def cores(self) -> int:
        """Number of cores' worth of time: the processors of the affinity mask, at most the CPU quota, rounded down."""
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        quotas = [quota for directory in self._groups("cpu") if (quota := _cpu_quota(directory)) is not None]
        return max(1, int(min([processors, *quotas])))

    def total_memory(self) -> int:
        """Bytes of memory, in use or not: the machine's, at most the control groups' limit."""
        limits = [limit for directory in self._groups("memory") if (limit := _memory_limit(directory)) is not None]
        return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])

    def free_memory(self) -> int:
        """Bytes of memory that can still be allocated without swapping.

        Memory in use is not known without /proc/meminfo: then all of the machine's memory counts as free.
        """
        left = [_memory_left(directory) for directory in self._groups("memory")]
        available = self._available()
        return min([self.total_memory() if available is None else available, *left])

    def cpu_name(self) -> str:
        """Model of the processor; "CPU" when the system does not say."""
        for line in _lines(self.root / "proc/cpuinfo"):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return "CPU"

    def _available(self) -> int | None:
        for line in _lines(self.root / "proc/meminfo"):
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None

    def _groups(self, controller: str) -> Iterator[Path]:
        """Directories of the control groups that this process is in, innermost first: of v2, and of v1's controller."""
        paths: dict[str, str] = {}
        for line in _lines(self.root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)  # see cgroups(7); v2 has no controllers here
            for name in controllers.split(","):
                paths[name] = path
        for line in _lines(self.root / "proc/self/mountinfo"):
            mount, _, source = line.partition(" - ")  # see proc_pid_mountinfo(5)
            kind, _, options = source.split(" ", 2)
            if kind == "cgroup2":
                path = paths.get("", "")
            elif kind == "cgroup" and controller in options.split(","):
                path = paths.get(controller, "")
            else:
                continue
            _, _, _, mount_root, mount_point, *_ = mount.split(" ")
            top = self.root / mount_point.lstrip("/")
            # In a container, the mount may show only the container's own group, under whatever path the host has.
            inner = path.removeprefix(mount_root) if path.startswith(mount_root) else ""
            directory = top / inner.strip("/")
            yield directory
            while directory != top:
                directory = directory.parent
                yield directory


def _cpu_quota(directory: Path) -> float | None:
    """The cores' worth of CPU time that a control group may use; None: unlimited."""
    words = _text(directory / "cpu.max").split()
    if not words:
        words = [_text(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if not all(word.isdigit() for word in words) or int(words[1]) == 0:  # "max", -1, or no file
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(directory: Path) -> int | None:
    """Bytes that a control group may use; None: unlimited. v1 writes a huge number for that."""
    limits = [_text(directory / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    numbers = [int(limit) for limit in limits if limit.isdigit()]
    return min(numbers, default=None)


def _memory_left(directory: Path) -> int:
    """Bytes that a control group may still use: page cache that nothing has mapped lately counts as free."""
    limit = _memory_limit(directory)
    used = _text(directory / "memory.current") or _text(directory / "memory.usage_in_bytes")
    if limit is None or not used.isdigit():
        return NO_LIMIT
    cached = {name: value for name, _, value in (line.partition(" ") for line in _lines(directory / "memory.stat"))}
    # v1 counts groups below only under total_.
    reclaimable = cached.get("total_inactive_file", cached.get("inactive_file", "0"))
    return max(0, limit - max(0, int(used) - int(reclaimable)))


def _text(path: Path) -> str:
    """A small file's text without the line's end; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
