"""`engine profile layers` of an offline load."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.cli.profile import layers

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
    sizes = ("--batch", "2", "--context", "8", "--steps", "6", "--depth", "3", "--scheduler", "multi_step")
    done = run("profile", "layers", str(engine_checkpoint), *sizes, *FLAGS)
    assert done.exit_code == 0, done.stderr
    assert "model.layers.1 " in done.stdout
    assert re.search(r"model\.layers\.1 +64 ", done.stdout)  # 8 iterations of 7 modules and of what is around them
    assert "down_proj" not in done.stdout
    assert "no floors: the device's peaks are not known; give --peak-bandwidth and --peak-flops" in done.stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--by", "layer"), "--by 'layer' is none of auto, module and kind"),
        (("--batch", "5", "--max-running", "4"), "a batch of 5 cannot run: at most 4"),
        (("--context", "2000", "--batch", "1"), "--context 2000 and .* make more than the 512 that a context can have"),
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


def test_a_running_server_is_profiled(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        ["model.layers.0.mlp.down_proj", "linear", 1, 1, 0, 700.0, 0, 2e9, 0, 1e6],
        ["(batch)", "", 0, 2, 50, 100.0, 0, 0, 0, 0],
    ]
    rank = {
        "rank": 0,
        "device": "cuda",
        "steps": 20,
        "step_us": 1000.0,
        "idle_us": 200.0,
        "decodes": [60, 64],
        "prefill_tokens": [0, 512],
        "graphs": [["decode 64, greedy", 19], ["", 1]],
        "flops": 2e9,
        "flops8": 0,
        "bytes": 9e5,
        "uncounted": [],
        "num_rows": 2,
        "rows": rows,
    }
    peaks = {"bandwidth": 4.8e12, "flops": 989e12, "flops8": None, "source": "data sheet"}
    answers = {
        "/start_layer_profile": {"steps": 100, "seconds": 1.0},
        "/stop_layer_profile": {"steps": 1100, "seconds": 2.0, "ranks": [rank], "peaks": peaks},
    }
    asked = []

    def post(url: str, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append((url, key, path, body))
        return answers[path]

    monkeypatch.setattr(layers, "post", post)
    file = tmp_path / "layers.json"
    remote = ("--url", "http://h:1", "--admin-api-key", "k", "--replica", "1", "--seconds", "0.1")
    done = run("profile", "layers", *remote, "--steps", "20", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert asked == [
        ("http://h:1", "k", "/start_layer_profile", {"replica": 1, "steps": 20}),
        ("http://h:1", "k", "/stop_layer_profile", {"replica": 1}),
    ]
    assert "60 to 64 decodes and 0 to 512 prefill tokens per step: a step by layer, 20 steps" in done.stdout
    assert "us per step: 1,000.0 sum of the table, 800.0 without (idle)" in done.stdout
    assert "; 1,000.0 by the engine's clock, in all steps of these seconds (+0.0%)" in done.stdout
    assert "CUDA graphs, with the number of steps: decode 64, greedy (19)" in done.stdout
    [table] = json.loads(file.read_text())["tables"]
    assert [line["name"] for line in table["lines"]] == ["model.layers.0.mlp.down_proj", "(batch)", "(idle)"]
    refused = run("profile", "layers", "--url", "http://h:1", "--max-running", "3")
    assert (refused.exit_code, "scheduler.max_running" in refused.stderr) == (2, True)


def test_a_prefill_that_is_too_long_is_refused_before_the_decode_steps(
    run: Any, engine_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "profile_decode", lambda *_: pytest.fail("decode steps are profiled"))
    done = run("profile", "layers", str(engine_checkpoint), "--prefill", "512", *FLAGS)
    assert done.exit_code == 2, done.stdout
    assert "--prefill 512 and a token after it make more than the 512 that a context can have" in done.stderr
