"""scripts/tune_kernels.py: which results that come with the package it measures again."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.autotune import load_shipped

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SHIPPED = SCRIPTS.parent / "core/autotune/choices/NVIDIA-H200.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("tune_kernels")


def test_cache_ignores_the_row_classes_that_are_to_be_measured_again(script: Any, tmp_path: Path) -> None:
    machine = json.loads(SHIPPED.read_text(encoding="utf-8"))["machine"]
    every = load_shipped(machine)
    assert {rows for _, rows in every} >= {64, 128}
    kept = script.PartlyOutdatedCache(tmp_path, machine, [64, 128]).shipped()
    assert set(kept) == {(op, rows) for op, rows in every if rows not in (64, 128)}
    assert set(script.PartlyOutdatedCache(tmp_path, machine, []).shipped()) == set(every)
