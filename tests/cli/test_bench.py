"""`engine bench`: the same work each time, and figures that belong to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.bench import app, make_load, parse_range, run_load
from engine.cli.bench_report import Row, report, write
from engine.core import Engine
from engine.core.errors import ConfigError
from engine.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "llama")


@pytest.mark.parametrize(("text", "bounds"), [("512", (512, 512)), ("100-1024", (100, 1024)), ("7-7", (7, 7))])
def test_lengths_are_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    assert parse_range(text, "--input-len") == bounds


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "-5", "1-2-3", "5-"])
def test_other_lengths_are_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_range(text, "--input-len")


def test_a_load_is_the_same_each_time_but_its_tokens_are_not() -> None:
    load = make_load(5, (3, 9), (2, 4), seed=1)
    assert load == make_load(5, (3, 9), (2, 4), seed=1) != make_load(5, (3, 9), (2, 4), seed=2)
    first, again, other = load.requests(100, "a"), load.requests(100, "a"), load.requests(100, "b")
    assert [request.prompt for request in first] == [request.prompt for request in again]
    assert [len(request.prompt) for request in first] == [len(request.prompt) for request in other]
    assert first[0].prompt != other[0].prompt


def test_what_is_measured_is_what_was_asked_for(tiny: Path) -> None:
    load = make_load(4, (3, 9), (2, 4), seed=0)
    with Engine(model=str(tiny), executor__device="cpu", cache__memory="8MiB") as engine:
        run_load(engine, load, prefix="first-")
        measured = run_load(engine, load, prefix="second-")
    assert measured.prompt_tokens == sum(inputs for inputs, _ in load.lengths)
    assert measured.output_tokens == sum(outputs for _, outputs in load.lengths)
    assert measured.steps >= max(outputs for _, outputs in load.lengths)
    assert {"schedule", "submit", "wait", "commit", "prepare", "forward", "sample"} <= set(measured.phases)
    assert 0 < measured.phases["forward"] < measured.seconds


def test_throughput_prints_a_table_and_writes_json(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    flags = ["--requests", "2", "--input-len", "4-8", "--output-len", "3", "--repeat", "1", "--kv-memory", "8MiB"]
    done = CliRunner().invoke(app, ["throughput", "--model", str(tiny), *flags, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "output tokens a second" in done.output
    written = json.loads(file.read_text())
    assert written["benchmark"] == "throughput"
    assert written["settings"]["output_tokens"] == 6
    assert written["versions"]["torch"]
    rates = [row["value"] for row in written["rows"] if row["unit"] == "tokens/s"]
    assert len(rates) == 2
    assert all(rate > 0 for rate in rates)


def test_a_report_names_what_its_figures_hold_for(tmp_path: Path) -> None:
    made = report("some", "a machine", [Row(metric="speed", value=2.0, unit="m/s")], {"size": 3})
    assert set(made) == {"benchmark", "date", "machine", "commit", "versions", "settings", "rows"}
    write(tmp_path / "x.json", made)
    assert json.loads((tmp_path / "x.json").read_text()) == made
