"""`engine bench throughput`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.load import make_load
from engine.cli.bench.throughput import parse_load
from engine.core.errors import ConfigError


def test_a_load_is_a_preset_or_spelt_out() -> None:
    assert parse_load("512x256", 0) == make_load(1000, (512, 512), (256, 256), 0)
    assert parse_load("uneven", 0) == make_load(256, (100, 1024), (100, 1024), 0)
    assert parse_load("3:4-6:7", 5) == make_load(3, (4, 6), (7, 7), 5)


@pytest.mark.parametrize("text", ["512", "0:4:4", "3:4", "x:1:1", "3:4:5:6", "3:0:5"])
def test_another_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--load"):
        parse_load(text, 0)


def test_several_loads_run_in_one_engine(run: Any, flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    loads = ["--load", "2:4-8:3", "--load", "3:5:2", "--repeat", "2"]
    done = run("bench", "throughput", *flags, *loads, "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert "2 requests, 4-8 in / 3 out" in done.stdout
    written = json.loads(file.read_text())
    assert written["benchmark"] == "throughput"
    assert [load["output_tokens"] for load in written["settings"]["loads"]] == [6, 6]
    assert "0.01 TB/s as given" in written["settings"]["ceilings"]
    rates = {row["case"]: row for row in written["rows"] if row["metric"] == "output tokens a second"}
    assert list(rates) == ["2 requests, 4-8 in / 3 out", "3 requests, 5 in / 2 out"]
    assert all(row["value"] > 0 and 0 < row["share"] < 1 for row in rates.values())


def test_throughput_runs_a_load_of_given_numbers(run: Any, flags: list[str]) -> None:
    done = run(
        "bench", "throughput", *flags, *["--requests", "2", "--input-len", "4", "--output-len", "3", "--repeat", "1"]
    )
    assert done.exit_code == 0, done.stderr
    assert "2 requests, 4 in / 3 out" in done.stdout


def test_a_load_and_its_numbers_exclude_each_other(run: Any, flags: list[str]) -> None:
    done = run("bench", "throughput", *flags, "--load", "uneven", "--requests", "3")
    assert done.exit_code == 2
    assert "--requests" in done.stderr
