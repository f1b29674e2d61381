from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from engine.server.metrics.processes import read_processes


def test_processes_are_read_with_their_roles_and_workers() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = read_processes(os.getpid(), [os.getpid(), 0], [os.getpid()])
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
    assert read_processes(ended.pid, [], []) == []
    assert read_processes(1, [2], [3], proc=tmp_path) == []
