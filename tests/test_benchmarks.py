"""The scripts in benchmarks/, on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli.bench.ceilings import Ceilings
from engine.cli.bench.roofline import Roofline, stored_cost
from engine.cli.bench.throughput import PRESETS
from engine.core.config.tree import EngineConfig, ExecutorConfig, ModelConfig
from engine.core.device import DeviceInfo

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def references() -> Any:
    return json.loads((SCRIPTS / "references.json").read_text(encoding="utf-8"))


def test_a_case_of_the_table_has_every_row_of_the_references(tmp_path: Path, references: Any) -> None:
    done = run_script("vllm_table.py", "--small", "--cases", "llama-3.1-8b:none", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "h200-llama-3.1-8b-none.json").read_text())
    assert written["settings"]["prefix_caching"] is False
    measured = {row["metric"] for row in written["rows"]}
    assert {row["metric"] for row in references["models"]["llama-3.1-8b:none"]["rows"]} <= measured


def test_first_burst_reports_each_burst_and_what_came_late(tmp_path: Path) -> None:
    file = tmp_path / "burst.json"
    done = run_script("first_burst.py", "--small", "--cases", "tiny:4", "--set=cache.memory=32MiB", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    times = [row for row in rows if row["metric"] == "TTFT p99"]
    assert [row["case"] for row in times] == [f"tiny:4, burst {number}" for number in (1, 2, 3)]
    assert all(row["value"] > 0 for row in times)
    late = {row["metric"]: row["value"] for row in rows if "while serving" in row["metric"]}
    assert late == {"kernels_compiled while serving": 0, "graphs_captured while serving": 0}


def test_stream_events_reports_each_kind_of_stream(tmp_path: Path) -> None:
    file = tmp_path / "events.json"
    done = run_script("stream_events.py", "--streams=2", "--tokens=40", "--repeat=1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["metric"] for row in rows} >= {"plain", "four stop strings", "parsed, reasoning", "5 log probabilities"}
    assert all(row["value"] >= 0 for row in rows)  # CPU time, whose clock may tick once in 10 ms


def test_an_unknown_case_is_refused() -> None:
    done = run_script("vllm_table.py", "--cases", "gpt:none")
    assert done.returncode == 2
    assert "qwen3-0.6b:none" in done.stderr


def test_the_references_name_the_workloads_as_they_are_measured(
    references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.cli.bench.load import make_load

    monkeypatch.syspath_prepend(str(SCRIPTS))
    from vllm_table import BATCHES, LATER, LATER_BATCHES, LATER_LOADS  # type: ignore[import-not-found]

    for case, model in references["models"].items():
        loads = [*PRESETS.values(), *(LATER_LOADS if case in LATER else ())]
        names = {make_load(*shape).name for shape in loads}
        assert {row["case"] for row in model["rows"] if row["metric"] == "output tokens a second"} == names
        batches = [f"batch {batch}" for batch in (LATER_BATCHES if case in LATER else BATCHES)]
        assert [row["case"] for row in model["rows"] if row["metric"] == "decode step"] == batches


def test_floors_and_goals_follow_from_the_models(references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from models import MODELS  # type: ignore[import-not-found]
    from vllm_table import ONLINE, REFERENCED  # type: ignore[import-not-found]

    assert list(references["models"]) == list(REFERENCED)
    ceilings = Ceilings(bandwidth=references["ceilings"]["copy_tbps"] * 1e12, flops=1e15, source="a copy")
    bfloat16 = EngineConfig(model=ModelConfig(dtype="bfloat16"), executor=ExecutorConfig(device="cpu"))
    for case, model in references["models"].items():
        config = MODELS[REFERENCED[case]]
        if case.partition(":")[2] in ONLINE:
            config = config | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
        roofline = Roofline(cost=stored_cost(bfloat16, config, DeviceInfo(type="cpu")), ceilings=ceilings)
        assert roofline.weights() * 1e3 == pytest.approx(model["floor_ms"], rel=0.01)
        for row in model["rows"]:
            if row["metric"] == "output tokens a second":
                best = max(row[name] for name in references["versions"] if row[name] is not None)
                assert row["goal"] == round(1.3 * best)


def test_variants_are_measured_or_refused_with_a_sentence(tmp_path: Path) -> None:
    only = "4 decode steps at once,attention: flashinfer"  # which has no kernels for a CPU
    done = run_script(
        "ablation.py", "--small", "--only", only, "--set", "executor.device=cpu", "--results", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "h200-ablation.json").read_text())
    [(label, sentence)] = written["settings"]["refused"].items()
    assert label == "attention: flashinfer"
    assert "flashinfer" in sentence
    assert [row["case"] for row in written["rows"]] == ["4 decode steps at once"] * 3


@pytest.mark.parametrize("gain", ["object reuse: batch kept between steps", "text outside the engine's process"])
def test_a_known_gain_is_measured_without_it(gain: str) -> None:
    small = ["--model", "tiny", "--size", "small", "--set", "executor.device=cpu", "--set", "cache.memory=32MiB"]
    done = run_script("known_gains.py", *small, "--here", "--only", gain, "--side", "off")
    assert done.returncode == 0, done.stderr
    [(metric, (value, unit))] = json.loads(done.stdout.splitlines()[-1])["figures"].items()
    assert (metric, unit) == ("output tokens a second", "tokens/s")
    assert value > 0


def test_constrained_decoding_reports_each_share_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--model", "tiny", "--batches", "1,2", "--temperatures", "0", "--steps", "4", "--rounds", "1"]
    given = ["--set", "executor.device=cpu", "--set", "cache.memory=32MiB", "--set", "model.max_len=0"]
    done = run_script("constrained_decoding.py", *small, *given, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    cases = [row["case"].partition(", ")[2] for row in rows if row["metric"] == "decode step"]
    shares = ["none", "all", "none", "half", "all"]
    assert cases == [f"batch {1 if at < 2 else 2}, {share} constrained" for at, share in enumerate(shares)]
    assert all(row["value"] > 0 for row in rows if row["metric"] in ("compile", "decode step"))


def test_model_directories_are_what_a_server_needs(tmp_path: Path) -> None:
    done = run_script("models.py", str(tmp_path), "tiny")
    assert done.returncode == 0, done.stderr
    from engine.core.config.tree import ModelConfig
    from engine.core.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.of_model(ModelConfig(path=str(tmp_path / "tiny")))
    assert tokenizer.decode([300, 510]) == "token300 token510 "


def test_perplexities_of_a_few_methods(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--characters", "400", "--samples", "4", "--sample-length", "32", "--device", "cpu"]
    cases = "int8; GPTQ-4; fp8 KV cache, calibrated"
    done = run_script("quant_perplexity.py", *small, "--cases", cases, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    found = {
        metric: {row["case"]: row["value"] for row in rows if row["metric"] == metric}
        for metric in ("perplexity", "size")
    }
    assert list(found["perplexity"]) == ["bf16", *cases.split("; ")]
    sizes = found["size"]
    assert sizes["GPTQ-4"] < sizes["int8"] < sizes["bf16"] < sizes["fp8 KV cache, calibrated"]
    assert found["perplexity"]["fp8 KV cache, calibrated"] != found["perplexity"]["bf16"]


def test_ranks_are_measured_beside_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ("--model", "tiny", "--device", "cpu", "--batches", "1", "2", "--steps", "4", "--json", str(file))
    done = run_script("tensor_parallel.py", *options)
    assert done.returncode == 0, done.stderr
    cases = [row["case"] for row in json.loads(file.read_text())["rows"]]
    assert cases == [f"{ranks} x, {what}" for ranks in (1, 2) for what in ("batch 1", "batch 2", "prefill 2 x 64")]


RANK_SCRIPT = """
import argparse
from rank_processes import add_rank_options, is_rank, rows_of_first_rank
from engine.cli.bench.report import Row

def measure_rank(arguments):
    rank, ranks = arguments.rank
    return [Row(metric=arguments.name, case=f"rank {rank} of {ranks}", value=1.5, unit="us")]

parser = argparse.ArgumentParser()
parser.add_argument("--name", default="none")
add_rank_options(parser)
arguments = parser.parse_args()
if not is_rank(arguments, measure_rank):
    print(*rows_of_first_rank(__file__, 2, ["--name", "given"]))
"""


def test_rank_processes_return_the_rows_of_the_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")]))
    script = tmp_path / "script.py"
    script.write_text(RANK_SCRIPT)
    done = run_script(str(script))
    assert done.returncode == 0, done.stderr
    assert "metric='given'" in done.stdout
    assert "case='rank 0 of 2'" in done.stdout
    assert "rank 1" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduces_in_one_shot_and_two_equal_the_sum_on_gpus(ranks: int, tmp_path: Path) -> None:
    """The script compares each result with float32, and between ranks bit for bit, before it measures."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    file = tmp_path / "result.json"
    done = run_script("all_reduce.py", "--ranks", str(ranks), "--rows", "1", "300", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = {(row["metric"], row["case"]) for row in json.loads(file.read_text())["rows"]}
    ways = ("separate", "one shot", "two shots")
    assert found == {(way, f"{ranks} x, {rows} rows") for way in ways for rows in (1, 300)}


def test_kv_cost_reports_every_case_when_it_runs_once(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    done = run_script("kv_cost.py", "--requests", "20", "--concurrency", "4", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["metric"] == "scheduling"
    assert len(rows) == 1 + 2 * 3


def test_free_threading_names_the_unit_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("free_threading")
    figures = {"front end, us per event": 15.0, "engine process, us per output": 1.5}
    monkeypatch.setattr(module, "run_script", lambda *_: figures)
    assert module.server("python") == {
        ("256 streams, front end", "us/event"): 15.0,
        ("256 streams, engine process", "us/output"): 1.5,
    }


def test_fallback_says_in_a_sentence_which_plugin_refuses(tmp_path: Path) -> None:
    done = run_script("fallback.py", "--small", "--set", "executor.device=abacus", "--results", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: auto: ")
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr
