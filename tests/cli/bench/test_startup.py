"""`engine bench startup`."""

from __future__ import annotations

import compileall
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.startup import Start, bytecode_hint, median_of_later, rows_of, start
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
    phases = {row["metric"]: row["value"] for row in rows if row["metric"] != "to the first token"}
    assert {"interpreter and command line", "imports", "first token"} <= set(phases)
    assert all(seconds >= 0 for seconds in phases.values())
    total = rows[0]
    assert (total["metric"], total["case"]) == ("to the first token", "first start")
    assert total["value"] == pytest.approx(sum(phases.values()))
    assert 0 < total["share"] < 1


def test_median_leaves_out_the_first_start_where_there_are_others() -> None:
    first, slow, fast = (
        Start(phases=(("imports", 1.0), ("graphs", seconds)), weights_bytes=1, device="cpu") for seconds in (9, 3, 2)
    )
    assert median_of_later([first]) is first
    assert median_of_later([first, slow, fast]) is slow
    rows = {(row.metric, row.case): row.value for row in rows_of([first, slow, fast], 0.5)}
    assert rows["to the first token", "first start"] == 10
    assert rows["to the first token", "later start"] == 4
    assert rows["graphs", "first start"] == 9
    assert rows["graphs", "later start"] == 3


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    with pytest.raises(ExecutorError, match="Unheard"):
        start(EngineConfig(model=ModelConfig(path=str(tmp_path))))


def test_modules_that_every_start_compiles_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "seldom"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    hint = bytecode_hint("seldom")
    assert hint is not None
    assert f"{package / '__pycache__'} cannot be written; compile them once" in hint
    assert f"compileall -q {package})" in hint
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "PYTHONDONTWRITEBYTECODE is set" in (bytecode_hint("seldom") or "")
    compileall.compile_dir(package, quiet=2)
    assert bytecode_hint("seldom") is None
    assert bytecode_hint("is_not_installed") is None
