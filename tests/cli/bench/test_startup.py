"""`engine bench startup`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.startup import start
from engine.core import EngineConfig
from engine.core.config.tree import ModelConfig
from engine.core.errors import ExecutorError


def test_a_fresh_process_tells_its_phases(run: Any, tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)  # no weights and no tokenizer
    file = tmp_path / "result.json"
    flags = [
        "--model",
        str(tmp_path),
        "--load-format",
        "dummy",
        "--kv-memory",
        "8MiB",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--bandwidth",
        "0.01",
    ]
    done = run("bench", "startup", *flags, "--repeat", "1", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert "to the first token" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    phases = {row["metric"]: row["value"] for row in rows if row["case"] == "phase"}
    assert {"interpreter and command line", "imports", "first token"} <= set(phases)
    assert all(seconds >= 0 for seconds in phases.values())
    total = rows[0]
    assert total["metric"] == "start-up to first token"
    assert total["value"] == pytest.approx(sum(phases.values()))
    assert 0 < total["share"] < 1


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    with pytest.raises(ExecutorError, match="Unheard"):
        start(EngineConfig(model=ModelConfig(path=str(tmp_path))))
