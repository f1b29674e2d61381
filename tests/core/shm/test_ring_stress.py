"""A few rounds of benchmarks/ring_stress.py; the script itself plays hundreds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ring_stress.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the script looks at /dev/shm and /proc")
def test_nothing_is_lost_doubled_torn_or_left_behind() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "4", "--largest", "1000000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no round failed\n")
    assert "pipe    messages received and checked" in done.stdout
