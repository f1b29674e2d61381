from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli.processes import _role


@pytest.mark.parametrize(
    ("script", "parent", "role"),
    [
        ("front_end.py", "supervisor", "front end"),
        ("engine_process.py", "supervisor", "engine"),
        ("executors.py", "engine", "worker"),
        ("merge.py", "engine", "helper"),
    ],
)
def test_a_process_has_the_role_of_its_program_whatever_its_arguments_are(
    tmp_path: Path, script: str, parent: str, role: str
) -> None:
    (tmp_path / script).write_text("input('started')")
    command = [sys.executable, "-P", str(tmp_path / script), '{"parts": "executors", "expected": ["front_end 0"]}']
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.read(1)  # its command line is there
        assert _role(child.pid, parent) == role
    finally:
        child.kill()
        child.communicate()
