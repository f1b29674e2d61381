"""`engine bench latency`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench import latency
from engine.cli.bench.latency import measure_decode, parse_prefill
from engine.cli.bench.load import Load, Measured
from engine.core import Engine
from engine.core.errors import ConfigError


def test_a_prefill_is_prompts_of_a_length() -> None:
    assert parse_prefill("16x2048") == (16, 2048)
    assert parse_prefill("none") is None


@pytest.mark.parametrize("text", ["16", "0x3", "x", "3x", ""])
def test_another_prefill_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        parse_prefill(text)


def test_a_step_is_the_difference_of_the_fastest_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(2, 1): [0.5, 0.3], (2, 9): [1.2, 1.9]}
    asked = []

    def run_load(engine: Engine, load: Load, prefix: str) -> Measured:
        [shape] = set(load.lengths)
        asked.append(prefix)
        seconds = times[len(load.lengths), shape[1]].pop(0)
        phases = {"submit": seconds / 2, "wait": seconds / 4, "launch": seconds / 8}
        return Measured(seconds=seconds, prompt_tokens=0, output_tokens=0, steps=0, phases=phases)

    monkeypatch.setattr(latency, "run_load", run_load)
    with Engine(model=str(tiny), executor__device="cpu", cache__memory="8MiB") as engine:
        decode = measure_decode(engine, 2, 16, 8, 2)
    step = (1.2 - 0.3) / 8
    assert decode.step == pytest.approx(step)
    assert decode.phases == pytest.approx({"submit": step / 2, "wait": step / 4, "launch": step / 8})
    assert decode.host == pytest.approx(step * (1 - 1 / 4 - 1 / 8))  # a CPU computes in the phase forward
    assert decode.context == 16 + (1 + 8) / 2
    assert len(set(asked)) == 4, "each run must draw tokens of its own"


def test_latency_measures_steps_by_batch_and_a_prefill(run: Any, flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--batch", "1,3", "--input-len", "8", "--steps", "12", "--prefill", "2x40"]
    done = run("bench", "latency", *flags, *sizes, "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert "prefill 2 x 40" in done.stdout
    written = json.loads(file.read_text())
    rows = {(row["metric"], row["case"]): row for row in written["rows"]}
    for batch in (1, 3):
        step = rows["decode step", f"batch {batch}"]
        assert step["unit"] == "ms"
        assert step["value"] > 0
        assert step["share"] > 0
        assert rows["output tokens a second", f"batch {batch}"]["value"] == pytest.approx(batch / step["value"] * 1e3)
        assert ("schedule, of a decode step", f"batch {batch}") in rows
    assert rows["prefill", "prefill 2 x 40"]["value"] > 0
    assert not any(row["case"].startswith("profile") for row in written["rows"])


def test_the_default_prefill_fits_a_short_context(run: Any, flags: list[str]) -> None:
    done = run("bench", "latency", *flags, "--batch", "1", "--input-len", "8", "--steps", "4", "--max-len", "64")
    assert done.exit_code == 0, done.stderr
    assert "prefill 16 x 63" in done.stdout


@pytest.mark.parametrize(
    ("sizes", "options"),
    [(["--prefill", "2x64"], "--prefill"), (["--steps", "60"], "--input-len and --steps")],
)
def test_lengths_beyond_the_context_are_refused_before_a_measurement(
    run: Any, flags: list[str], sizes: list[str], options: str
) -> None:
    common = ["--batch", "1", "--input-len", "4", "--steps", "4", "--max-len", "64"]
    done = run("bench", "latency", *flags, *common, *sizes)
    assert done.exit_code == 2
    assert f"sequences of {options} have 65 tokens, and the context holds 64" in done.stderr
    assert "per decode step" not in done.stderr


def test_a_batch_that_never_runs_is_refused(run: Any, flags: list[str]) -> None:
    done = run("bench", "latency", *flags, "--batch", "1,5", "--max-running", "4")
    assert done.exit_code == 2
    assert "a batch of 5 cannot run: at most 4" in done.stderr


def test_a_trace_needs_a_profile(run: Any, flags: list[str]) -> None:
    done = run("bench", "latency", *flags, "--trace", "x.json")
    assert done.exit_code == 2
    assert "--profile" in done.stderr
