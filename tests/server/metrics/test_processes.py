from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from engine.server.metrics.processes import ProcessReader


def test_processes_are_read_with_their_roles_and_workers() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = ProcessReader(os.getpid()).read([os.getpid(), 0], [os.getpid()])
    finally:
        child.kill()
        child.communicate()
    assert [(one.role, one.number) for one in found[:3]] == [("supervisor", "0"), ("front_end", "0"), ("engine", "0")]
    assert ("worker", "0.0") in [(one.role, one.number) for one in found[3:]]
    own = found[0]
    assert 0 < own.cpu_seconds < 1e5
    assert 2**20 < own.resident_bytes < own.virtual_bytes
    assert 0 < own.descriptors <= own.max_descriptors
    assert own.threads >= 1
    assert time.time() - 10**6 < own.started <= time.time() + 1


def test_a_process_that_has_ended_is_left_out(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert ProcessReader(ended.pid).read([], []) == []
    assert ProcessReader(1, tmp_path).read([2], [3]) == []


def test_workers_are_found_whichever_thread_has_started_them(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("btime 1000\n")
    stat = f"(python) S {' '.join(['1'] * 25)}\n"
    for pid, threads in ((7, {7: "", 8: "31 ", 9: "12 "}), (12, {}), (31, {})):
        directory = tmp_path / str(pid)
        (directory / "fd").mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} {stat}")
        (directory / "limits").write_text("")
        for thread, children in threads.items():
            (directory / "task" / str(thread)).mkdir(parents=True)
            (directory / "task" / str(thread) / "children").write_text(children)
    reader = ProcessReader(0, tmp_path)
    expected = [("engine", "0"), ("worker", "0.0"), ("worker", "0.1")]
    assert [(one.role, one.number) for one in reader.read([], [7])] == expected
    shutil.rmtree(tmp_path / "7" / "task")  # not looked at again
    assert [(one.role, one.number) for one in reader.read([], [7])] == expected
    assert reader.read([], [0]) == []
