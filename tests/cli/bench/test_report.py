"""Reports: figures with what they hold for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli.bench.report import Row, percent, report, write


def test_a_report_names_what_its_figures_hold_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report("some", "a machine", [Row(metric="speed", value=2.0, unit="m/s", share=0.5)], {"size": 3})
    assert set(made) == {"benchmark", "date", "machine", "commit", "versions", "settings", "rows"}
    assert made["versions"]["torch"]
    write(tmp_path / "x.json", made)
    assert json.loads((tmp_path / "x.json").read_text()) == made
    assert str(tmp_path / "x.json") in capsys.readouterr().err


def test_a_share_that_is_not_known_is_not_printed() -> None:
    assert (percent(0.456), percent(None)) == ("46%", "")
