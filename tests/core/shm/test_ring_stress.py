"""A few rounds of benchmarks/ring_stress.py; the script itself plays hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ring_stress.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the script looks at /dev/shm and /proc")
def test_nothing_is_lost_doubled_torn_or_left_behind(tmp_path):
    result = tmp_path / "stress.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "4", "--seed", "7", "--json", str(result)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads(result.read_text())["rows"]}
    assert rows[None, "rounds that failed"] == 0
    assert rows["pipe", "messages received and checked"] > 0
