"""benchmarks/ring.py, with few messages: that it measures all transports, not how fast they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ring.py"


FEW = ("--messages", "20", "--turns", "1", "--idle", "0.05", "--intervals", "100")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it measures rings with futexes")


def measured(result: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), *FEW, *arguments, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


def test_every_transport_is_measured(tmp_path):
    rows = measured(tmp_path / "ring.json")
    assert {row["metric"] for row in rows} >= {"hop p50", "hop p99", "reader idle"}
    assert len({row["case"] for row in rows}) == 6
    assert all(row["value"] >= 0 for row in rows)


def test_only_the_transports_named_are_measured(tmp_path):
    rows = measured(tmp_path / "ring.json", "--only", "ring, anticipates")
    assert {row["case"] for row in rows} == {"ring, anticipates, every 100 us"}
