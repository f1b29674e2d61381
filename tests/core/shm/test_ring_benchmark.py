"""benchmarks/ring.py, with few messages: that it measures all transports, not how fast they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ring.py"
FEW = ("--messages", "20", "--turns", "1", "--idle", "0.05", "--intervals", "300")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it measures rings with futexes")


def measured(result: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), *FEW, *arguments, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


def test_every_transport_is_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path / "ring.json")
    assert {row["metric"] for row in rows} >= {"hop p50", "hop p99", "announce p50", "reader idle"}
    assert len({row["case"] for row in rows}) == 6
    assert all(row["value"] >= 0 for row in rows)


def test_only_the_transports_named_are_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path / "ring.json", "--only", "ring", "ring of pipes")
    assert {row["case"] for row in rows} == {"ring, every 300 us", "ring of pipes, every 300 us"}


def test_a_writer_that_works_longer_than_its_interval_is_refused() -> None:
    command = [sys.executable, str(SCRIPT), *FEW, "--work", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--work must be less than each of --intervals" in done.stderr
