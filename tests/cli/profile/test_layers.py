"""`engine profile layers` of an offline load."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--kv-memory", "8MiB", "--device", "cpu", "--threads", "1", "--max-batch-tokens", "64")
PEAKS = ("--peak-bandwidth", "0.01", "--peak-flops", "0.1")


def test_decode_and_prefill_steps_are_shown_by_layer(run: Any, engine_checkpoint: Path, tmp_path: Path) -> None:
    table, report = tmp_path / "layers.csv", tmp_path / "layers.json"
    sizes = ("--batch", "3", "--context", "20", "--steps", "4", "--prefill", "32", "--by", "kind")
    files = ("--csv", str(table), "--json", str(report))
    done = run("profile", "layers", str(engine_checkpoint), *sizes, *FLAGS, *PEAKS, *files)
    assert done.exit_code == 0, done.stderr
    assert "decode, 3 sequences of 20 tokens on: a step by layer, 4 steps" in done.stdout
    assert "prefill, prompts of 32 tokens: a step by layer, 4 steps" in done.stdout
    assert "operators us" in done.stdout
    assert "floors by 0.01 TB/s and 0.1 TFLOP/s (as given)" in done.stdout
    made = json.loads(report.read_text())
    assert made["settings"]["batch"] == 3
    decode, prefill = made["tables"]
    for one in (decode, prefill):
        assert one["sum_us"] == pytest.approx(one["step_us"])
        assert sum(line["device_us"] for line in one["lines"]) == pytest.approx(one["sum_us"])
        lines = {line["name"]: line for line in one["lines"]}
        assert lines["model.layers.*.mlp.down_proj"]["modules"] == 2
        assert lines["model.layers.*.mlp.down_proj"]["calls"] == 2
        assert list(lines)[-1] == "(idle)"
    heads = [next(line for line in one["lines"] if line["name"] == "lm_head") for one in (decode, prefill)]
    assert [head["flops"] for head in heads] == [2 * 3 * 64 * 512, 2 * 2 * 64 * 512]  # two prompts per step
    linear = next(line for line in prefill["lines"] if line["name"].endswith("o_proj"))
    assert linear["flops"] == 2 * (2 * 64 * 64 * 64)  # two layers, 64 tokens
    assert linear["floor_us"] == pytest.approx(max(linear["bytes"] / 1e10, linear["flops"] / 1e11) * 1e6)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(decode["lines"]) + len(prefill["lines"])
    assert rows[0]["steps"] == decode["title"]
    assert float(rows[1]["device_us"]) == decode["lines"][1]["device_us"]


def test_names_are_cut_to_a_depth_and_floors_need_peaks(run: Any, engine_checkpoint: Path) -> None:
    sizes = ("--batch", "2", "--context", "8", "--steps", "2", "--depth", "3")
    done = run("profile", "layers", str(engine_checkpoint), *sizes, *FLAGS)
    assert done.exit_code == 0, done.stderr
    assert "model.layers.1 " in done.stdout
    assert "down_proj" not in done.stdout
    assert "no floors: the device's peaks are not known; give --peak-bandwidth and --peak-flops" in done.stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--by", "layer"), "--by 'layer' is none of auto, module and kind"),
        (("--batch", "5", "--max-running", "4"), "a batch of 5 cannot run: at most 4"),
        (("--context", "2000", "--batch", "1"), "--context 2000 and .* make more than the 512 that a context can have"),
        (
            ("--prefill", "512", "--batch", "1", "--context", "8", "--steps", "1"),
            "--prefill 512 is more than a context",
        ),
        (
            ("--batch", "8", "--context", "100", "--kv-memory", "256KiB"),
            "not all of the 8 sequences decoded in every step: the KV",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    run: Any, engine_checkpoint: Path, options: tuple[str, ...], error: str
) -> None:
    flags = FLAGS[2:] if "--kv-memory" in options else FLAGS
    done = run("profile", "layers", str(engine_checkpoint), *options, *flags)
    assert done.exit_code == 2, done.stdout
    assert re.search(error, done.stderr), done.stderr
