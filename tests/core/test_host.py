"""Cores and memory, from files as the kernel writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.host import Host

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n"
V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
)

MakeHost = Callable[[dict[str, str]], Host]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHost:
    """Makes a machine of 8 processors and 64 GiB with these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)

    def make(files: dict[str, str]) -> Host:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Host(tmp_path)

    return make


def test_the_machine_counts_without_control_groups(host: MakeHost) -> None:
    found = host({"proc/meminfo": MEMINFO})
    assert (found.cores(), found.free_memory(), found.total_memory()) == (8, 32 * GIB, 64 * GIB)


def test_the_machine_counts_without_proc(host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    found = host({})
    assert (found.cores(), found.free_memory(), found.total_memory()) == (10, 64 * GIB, 64 * GIB)
    assert found.cpu_name() == "CPU"


def test_the_processor_has_a_name(host: MakeHost) -> None:
    assert host({"proc/cpuinfo": "processor: 0\nmodel name\t: Fast One\n"}).cpu_name() == "Fast One"


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_a_cpu_quota_of_v2_bounds_the_cores(host: MakeHost, quota: str, cores: int) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/a/b/cpu.max": quota + "\n"}
    assert host(files).cores() == cores


def test_the_smallest_limit_of_nested_groups_counts(host: MakeHost) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2, "proc/meminfo": MEMINFO}
    files |= {"sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "600000 100000"}
    files |= {"sys/fs/cgroup/a/memory.max": str(6 * GIB), "sys/fs/cgroup/a/b/memory.max": "max"}
    files |= {"sys/fs/cgroup/a/memory.current": str(2 * GIB)}
    found = host(files)
    assert (found.cores(), found.total_memory(), found.free_memory()) == (3, 6 * GIB, 4 * GIB)


def test_page_cache_counts_as_free_in_a_group(host: MakeHost) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "proc/meminfo": MEMINFO}
    files |= {"sys/fs/cgroup/memory.max": str(8 * GIB), "sys/fs/cgroup/memory.current": str(7 * GIB)}
    files |= {"sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {5 * GIB}\n"}
    assert host(files).free_memory() == 6 * GIB


def test_memory_beyond_the_machines_counts_as_the_machines(host: MakeHost) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "proc/meminfo": MEMINFO}
    files |= {"sys/fs/cgroup/memory.max": str(500 * GIB), "sys/fs/cgroup/memory.current": "0"}
    assert (host(files).free_memory(), host(files).total_memory()) == (32 * GIB, 64 * GIB)


def test_groups_of_v1_bound_cores_and_memory(host: MakeHost) -> None:
    files = {"proc/self/cgroup": "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n", "proc/self/mountinfo": V1}
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/docker/x/", "sys/fs/cgroup/memory/docker/x/"
    files |= {cpu + "cpu.cfs_quota_us": "200000\n", cpu + "cpu.cfs_period_us": "100000\n"}
    files |= {memory + "memory.limit_in_bytes": str(4 * GIB), memory + "memory.usage_in_bytes": str(3 * GIB)}
    files |= {memory + "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n", "proc/meminfo": MEMINFO}
    found = host(files)
    assert (found.cores(), found.total_memory(), found.free_memory()) == (2, 4 * GIB, 2 * GIB)


def test_unlimited_groups_of_v1_bound_nothing(host: MakeHost) -> None:
    files = {"proc/self/cgroup": "9:memory:/\n4:cpu,cpuacct:/\n", "proc/self/mountinfo": V1, "proc/meminfo": MEMINFO}
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/", "sys/fs/cgroup/memory/"
    files |= {cpu + "cpu.cfs_quota_us": "-1\n", cpu + "cpu.cfs_period_us": "100000\n"}
    files |= {memory + "memory.limit_in_bytes": "9223372036854771712", memory + "memory.usage_in_bytes": str(GIB)}
    found = host(files)
    assert (found.cores(), found.total_memory(), found.free_memory()) == (8, 64 * GIB, 32 * GIB)


def test_a_container_sees_its_own_group_under_another_path(host: MakeHost) -> None:
    mount = "30 1 0:26 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files = {"proc/self/mountinfo": mount, "sys/fs/cgroup/cpu.max": "200000 100000"}
    assert host(files | {"proc/self/cgroup": "0::/docker/x\n"}).cores() == 2
    assert host(files | {"proc/self/cgroup": "0::/../elsewhere\n"}).cores() == 2
