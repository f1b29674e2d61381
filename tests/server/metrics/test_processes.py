from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.core.compilation.client import COMMAND
from engine.server.metrics.processes import ProcessReader


def test_processes_are_read_with_their_roles_and_workers(tmp_path: Path) -> None:
    script = tmp_path / "executors_worker.py"
    script.write_text("input('started')")
    child = subprocess.Popen([sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.read(1)  # its command line is there
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


WORKER = ("engine.plugins.executors.worker", "17")


def write_proc(proc: Path, programs: Mapping[int, Sequence[str]], children: Mapping[int, str]) -> None:
    """Files of /proc for processes: the arguments of Python of each, and the children of each thread of process 7."""
    (proc / "stat").write_text("btime 1000\n")
    for pid, arguments in programs.items():
        directory = proc / str(pid)
        (directory / "fd").mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} (python) S {' '.join(['1'] * 25)}\n")
        (directory / "limits").write_text("")
        (directory / "cmdline").write_text("".join(f"{one}\0" for one in ("python", "-P", "-m", *arguments)))
    for thread, started in children.items():
        (proc / "7" / "task" / str(thread)).mkdir(parents=True)
        (proc / "7" / "task" / str(thread) / "children").write_text(started)


def test_workers_are_found_whichever_thread_has_started_them(tmp_path: Path) -> None:
    write_proc(tmp_path, {7: ["engine.server.engine_process"], 12: WORKER, 31: WORKER}, {7: "", 8: "31 ", 9: "12 "})
    reader = ProcessReader(0, tmp_path)
    expected = [("engine", "0"), ("worker", "0.0"), ("worker", "0.1")]
    assert [(one.role, one.number) for one in reader.read([], [7])] == expected
    shutil.rmtree(tmp_path / "7" / "task")  # not looked at again
    assert [(one.role, one.number) for one in reader.read([], [7])] == expected
    assert reader.read([], [0]) == []


def test_helpers_of_an_engine_are_no_workers(tmp_path: Path) -> None:
    programs: dict[int, Sequence[str]] = {
        7: ["engine.server.engine_process"],
        11: COMMAND[3:],
        12: WORKER,
        13: ["engine.core.timeline.merge", '{"parts": "/tmp/executors"}'],
        14: WORKER,
    }
    write_proc(tmp_path, programs, {7: "11 12 13 14 15"})  # 15 has ended
    reader = ProcessReader(0, tmp_path)
    found = reader.read([], [7])
    assert [(one.role, one.number) for one in found] == [("engine", "0"), ("worker", "0.0"), ("worker", "0.1")]
    assert reader._workers == {7: [12, 14]}
