"""benchmarks/ring.py, with few messages: that it measures all transports, not how fast they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ring.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it measures rings with futexes")
def test_every_transport_is_measured(tmp_path):
    result = tmp_path / "ring.json"
    few = ("--messages", "20", "--turns", "1", "--idle", "0.05", "--intervals", "100")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few, "--json", str(result)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text())
    assert {row["metric"] for row in written["rows"]} >= {"hop p50", "hop p99", "reader idle"}
    assert len({row["case"] for row in written["rows"]}) == 6
    assert all(row["value"] >= 0 for row in written["rows"])
