from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.cli import quantize
from engine.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", tokenizer=True)


def test_quantize_writes_a_checkpoint_and_a_report(
    run: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "REPORT_SECONDS", 0.0)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the rat sat on the hat. " * 60)
    out = tmp_path / "out"
    options = ["--method", "gptq", "--group-size", "32", "--act-order", "none", "--no-symmetric", "--device", "cpu"]
    texts = ["--calibration", str(text), "--samples", "4", "--sample-length", "64", "--held-out", str(text)]
    result = run("quantize", str(model), str(out), *options, *texts, "--context", "64", "--max-shard-size", "100KB")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if " windows (" not in line]
    assert len(lines) < len(result.stderr.splitlines()), "perplexity reports no progress"
    assert lines[0].startswith("layer 1 of 2: error of weights ")
    assert [line.split()[0] for line in lines] == ["layer", "layer", "writing", "perplexity", "perplexity"]
    assert "perplexity  " in result.stdout
    assert f"written to  {out}" in result.stdout
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["group_size"], config["sym"]) == ("gptq", 32, False)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert json.loads((out / "quantize_report.json").read_text())["calibration"]["samples"] == 4

    again = run("quantize", str(model), str(out), *options, *texts, "--context", "64")
    assert again.exit_code == 2
    assert "holds a finished checkpoint" in again.stderr


@pytest.mark.parametrize(
    ("options", "begins", "columns"),
    [
        (["--method", "none"], "layer 1 of 2: KV scales ", ["layer", "key scale", "value scale"]),
        (
            ["--method", "int8"],
            "layer 1 of 2: error of weights ",
            ["layer", "error of weights", "error of outputs", "worst in", "key scale", "value scale"],
        ),
    ],
)
def test_scales_of_the_kv_cache_are_reported(
    run: Any, model: Any, tmp_path: Path, options: Any, begins: str, columns: Any
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the rat sat on the hat. " * 60)
    options = [*options, "--kv-cache", "fp8", "--device", "cpu", "--samples", "4", "--sample-length", "64"]
    out = tmp_path / "out"
    result = run("quantize", str(model), str(out), *options, "--calibration", str(text))
    assert result.exit_code == 0, result.stderr
    stored = json.loads((out / "quantize_report.json").read_text())["layers"]
    first = result.stderr.splitlines()[0]
    assert first.startswith(begins)
    assert f"scales {stored[0]['kv_scales']['key']:.3g} and {stored[0]['kv_scales']['value']:.3g}" in first
    header, _, *rows = [line for line in result.stdout.splitlines() if line.strip()]
    assert header.split() == " ".join(columns).split()
    for row, layer in zip(rows, stored, strict=False):
        assert row.split()[-2:] == [f"{layer['kv_scales'][name]:.4g}" for name in ("key", "value")]


def test_unquantized_routers_and_experts_are_named(run: Any, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", **experts)
    ignore = ["--ignore", r"re:.*\.experts\."]
    for options, named in (([], "mlp.gate (2)"), (ignore, "mlp.gate (2), mlp.experts (2)")):
        out = str(tmp_path / f"out{len(options)}")
        result = run("quantize", str(plain), out, "--method", "fp8", "--device", "cpu", *options)
        assert result.exit_code == 0, result.stderr
        assert f"unquantized {named}" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--method", "gptq"], "give --calibration FILE"),
        (["--method", "none", "--kv-cache", "fp8"], "--kv-cache fp8 needs text to run through the model; give --calib"),
        (["--method", "none"], "nothing would be quantized; give --kv-cache fp8"),
        (["--method", "awq", "--kv-cache", "fp8"], "use --format compressed-tensors, or leave out --kv-cache"),
        (["--method", "rtn", "--group-size", "100"], "use a power of two"),
        (["--method", "int8", "--bits", "4"], "--bits 4 is not for int8"),
        (
            ["--method", "int8", "--max-shard-size", "5 apples"],
            "'5 apples' is not a size; write it as 2GiB, 500MB or 4096",
        ),
        (["--method", "int8", "--held-out", "nowhere.txt"], "--held-out nowhere.txt cannot be read"),
    ],
)
def test_refusals_are_sentences(run: Any, model: Any, tmp_path: Path, options: Any, sentence: str) -> None:
    result = run("quantize", str(model), str(tmp_path / "out"), *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert not (tmp_path / "out").exists()


def test_long_phases_print_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(quantize.time, "monotonic", lambda: now)
    lines = quantize.Lines()
    lines.phase("perplexity of MODEL")
    for done in range(1, 61):
        now += 1.0
        lines.within("perplexity of MODEL", done, 60)
    assert capsys.readouterr().err.splitlines() == [
        "perplexity of MODEL",
        *(f"perplexity of MODEL: {done} of 60 windows ({done / 60:.0%})" for done in (10, 20, 30, 40, 50)),
    ]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_permissions_of_any_new_file(
    run: Any, model: Any, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        result = run("quantize", str(model), str(tmp_path / "out"), "--method", "int8", "--device", "cpu")
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.stderr
    files = [file for file in (tmp_path / "out").iterdir() if file.is_file()]
    assert {"config.json", "model.safetensors", "quantize_report.json"} <= {file.name for file in files}
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {file.name: oct(mode) for file in files}
