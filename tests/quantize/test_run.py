"""Whole runs: what is written, going on after a kill, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError, ConfigError, PluginError
from engine.quantize.calibration import Calibration
from engine.quantize.output import WORK
from engine.quantize.progress import Progress
from engine.quantize.run import HeldOut, quantize
from engine.quantize.settings import Settings
from engine.testing.checkpoints import make_checkpoint

GPTQ = Settings.choose("gptq", group_size=32)


def digests(path: Path) -> dict[str, str]:
    """Of all files but the report, which has times in it."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.iterdir()
        if file.name != "quantize_report.json"
    }


class Seen(Progress):
    def __init__(self) -> None:
        self.events = []

    def resumed(self, done: Any, total: Any) -> None:
        self.events.append(f"resumed {done}/{total}")

    def layer(self, report: Any, total: Any) -> None:
        self.events.append(f"layer {report.number}")

    def phase(self, text: Any) -> None:
        self.events.append(text.split()[0])


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.quantize.calibration import Calibration
from engine.quantize.progress import Progress
from engine.quantize.run import quantize
from engine.quantize.settings import Settings
model, output, text, method = sys.argv[1:]

class Kill(Progress):
    def layer(self, report, total):
        if report.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

settings = Settings.choose(method, group_size=32)
calibration = Calibration(files=(Path(text),), samples=8, length=64)
quantize(model, output, settings, calibration=calibration, device="cpu", progress=Kill())
"""


def test_killed_run_resumes_and_writes_the_same_checkpoint(
    model: Path, text: Path, calibration: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(model), str(out), str(text), "gptq"]
    # Sums of as many threads as here, to the last digit.
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Engine(str(out))

    with pytest.raises(ConfigError, match=r"differs in group_size \(32, now 64\).*--restart"):
        quantize(model, out, Settings.choose("gptq", group_size=64), calibration=calibration, device="cpu")
    other = Calibration(files=calibration.files, samples=8, length=64, seed=1)
    with pytest.raises(ConfigError, match="differs in calibration"):
        quantize(model, out, GPTQ, calibration=other, device="cpu")

    seen = Seen()
    report = quantize(model, out, GPTQ, calibration=calibration, device="cpu", progress=seen)
    assert seen.events == ["resumed 2/3", "layer 2", "writing"]
    whole = quantize(model, tmp_path / "whole", GPTQ, calibration=calibration, device="cpu")
    assert digests(out) == digests(tmp_path / "whole")
    assert not (out / WORK).exists()
    assert [layer.linears for layer in report.layers] == [layer.linears for layer in whole.layers]

    with pytest.raises(ConfigError, match="holds a finished checkpoint"):
        quantize(model, out, GPTQ, calibration=calibration, device="cpu")


class Stop(Exception):  # noqa: N818
    pass


class StopAt(Progress):
    def __init__(self, word: Any) -> None:
        self.word = word

    def layer(self, report: Any, total: Any) -> None:
        if self.word == f"layer {report.number}":
            raise Stop

    def phase(self, text: Any) -> None:
        if text.startswith(self.word):
            raise Stop


@pytest.mark.parametrize(
    ("where", "method"), [("layer 0", "awq"), ("layer 1", "int8"), ("writing", "int8"), ("perplexity", "int8")]
)
def test_run_resumes_from_any_point(
    where: Any, method: Any, model: Path, calibration: Any, text: Path, tmp_path: Path
) -> None:
    settings = Settings.choose(method, **({} if method == "int8" else {"group_size": 32}))
    held_out = HeldOut(text=text.read_text()[:300], context=64)
    outs = [tmp_path / "a", tmp_path / "b"]
    arguments = {"calibration": calibration, "held_out": held_out, "device": "cpu"}
    with pytest.raises(Stop):
        quantize(model, outs[0], settings, **arguments, progress=StopAt(where))
    reports = [quantize(model, out, settings, **arguments) for out in outs]
    assert digests(outs[0]) == digests(outs[1])
    assert reports[0].perplexity_after == reports[1].perplexity_after


def test_restart_deletes_the_earlier_run(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize(model, out, Settings.choose("rtn", group_size=32), device="cpu", progress=StopAt("layer 1"))
    seen = Seen()
    quantize(model, out, Settings.choose("rtn", group_size=64), device="cpu", restart=True, progress=seen)
    assert seen.events == ["layer 0", "layer 1", "layer 2", "writing"]


def test_two_processes_do_not_write_to_one_directory(model: Path, tmp_path: Path) -> None:
    settings = Settings.choose("rtn", group_size=32)

    class Second(Progress):
        def layer(self, report: Any, total: Any) -> None:
            with pytest.raises(ConfigError, match="another process is writing"):
                quantize(model, tmp_path / "out", settings, device="cpu")

    quantize(model, tmp_path / "out", settings, device="cpu", progress=Second())


def test_checkpoint_is_complete(model: Path, text: Path, tmp_path: Path) -> None:
    """Shards of a size, other tensors and files as they were, the report."""
    out = tmp_path / "out"
    settings = Settings.choose("rtn", group_size=32, ignore=("model.layers.1.mlp",))
    held_out = HeldOut(text=text.read_text()[:300], context=64)
    report = quantize(model, out, settings, held_out=held_out, device="cpu", shard_bytes=100_000)
    shards = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    tensors = {}
    for shard in shards:
        some = load_file(shard)
        assert sum(one.nbytes for one in some.values()) <= 100_000 or len(some) == 1
        assert all(index["weight_map"][name] == shard.name for name in some)
        tensors |= some
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
    before = load_file(model / "model.safetensors")
    kept = {name for name in before if name in tensors}
    assert all(torch.equal(before[name], tensors[name]) for name in kept)
    left = [f"model.layers.1.mlp.{end}" for end in ("gate_proj", "up_proj", "down_proj")]
    assert {name for name in kept if "_proj" in name} == {f"{name}.weight" for name in left}
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head", *left]
    assert config == json.loads((model / "config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()

    stored = json.loads((out / "quantize_report.json").read_text())
    assert stored["settings"]["group_size"] == 32
    assert stored["bytes_after"] == sum(shard.stat().st_size for shard in shards) < stored["bytes_before"]
    assert [len(layer["linears"]) for layer in stored["layers"]] == [7, 4, 7]
    assert stored["perplexity_after"]["perplexity"] == report.perplexity_after.value > 1
    assert stored["perplexity_after"]["loss"] == report.perplexity_after.loss != report.perplexity_before.loss
    assert all(0.01 < one["weight_error"] < 0.3 for layer in stored["layers"] for one in layer["linears"])
    assert stored["layers"][0]["linears"][0]["output_error"] is None
    with Engine(str(out), executor__device="cpu", cache__memory="8MiB") as engine:
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids) == 4


def test_shards_and_bfloat16_are_read(calibration: Any, tmp_path: Path) -> None:
    """A checkpoint in several files and in bfloat16; norms keep the type, scales get it."""
    plain = make_checkpoint(tmp_path / "plain", "qwen2", tokenizer=True, shards=True)
    for file in plain.glob("*.safetensors"):
        from safetensors.torch import save_file

        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    settings = Settings.choose("awq", group_size=32, format="compressed-tensors")
    report = quantize(plain, tmp_path / "out", settings, calibration=calibration, device="cpu")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.dtype for name, one in tensors.items() if one.is_floating_point()} == {torch.bfloat16}
    assert all(one.output_error < 0.2 for layer in report.layers for one in layer.linears)
    with Engine(str(tmp_path / "out"), executor__device="cpu", cache__memory="8MiB") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))


def test_fused_projections_are_quantized_as_they_are_stored(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "phi3", tokenizer=True)
    quantize(plain, tmp_path / "out", Settings.choose("rtn", group_size=32), device="cpu")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {name.split(".")[-1] for name in names if "qkv_proj" in name} >= {"weight_packed", "weight_shape"}
    with Engine(str(tmp_path / "out"), executor__device="cpu", cache__memory="8MiB") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))


def test_blocks_across_the_parts_of_a_fused_projection_are_refused(tmp_path: Path) -> None:
    """Of 96 outputs each, gate and up would share blocks, so the checkpoint could not be served."""
    plain = make_checkpoint(tmp_path / "plain", "glm4", tokenizer=True)
    settings = Settings.choose("fp8", granularity="block")
    with pytest.raises(ConfigError, match=r"\.0\.mlp\.gate_up_proj holds 96 outputs of .*gate_proj, which blocks"):
        quantize(plain, tmp_path / "out", settings, device="cpu")
    settings = Settings.choose("fp8", granularity="block", ignore=("re:.*gate_up_proj",))
    quantize(plain, tmp_path / "out", settings, device="cpu")
    with Engine(str(tmp_path / "out"), executor__device="cpu", cache__memory="8MiB") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))


@pytest.mark.parametrize("method", ["fp8", "rtn"])
def test_output_layer_of_any_name_stays_unquantized(method: str, tmp_path: Path) -> None:
    """GPT-NeoX has embed_out in place of lm_head."""
    plain = make_checkpoint(tmp_path / "plain", "gpt_neox", tokenizer=True)
    more = {} if method == "fp8" else {"group_size": 32}
    quantize(plain, tmp_path / "out", Settings.choose(method, **more), device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["embed_out"]
    with Engine(str(tmp_path / "out"), executor__device="cpu", cache__memory="8MiB") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))


def test_calibrated_methods_have_smaller_errors_than_rounding(model: Path, calibration: Any, tmp_path: Path) -> None:
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        settings = Settings.choose(method, group_size=32, symmetric=True)
        report = quantize(model, tmp_path / method, settings, calibration=calibration, device="cpu")
        errors[method] = sum(layer.mean("output_error") for layer in report.layers)
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["awq"] < 0.9 * errors["rtn"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fp8", "rtn", "gptq", "awq"])
def test_gpu_reports_the_same_errors(method: Any, model: Path, calibration: Any, tmp_path: Path) -> None:
    settings = Settings.choose(method, **({} if method == "fp8" else {"group_size": 32}))
    found = [
        quantize(model, tmp_path / device, settings, calibration=calibration, device=device)
        for device in ("cpu", "cuda")
    ]
    for here, there in zip(*(report.layers for report in found), strict=True):
        assert there.mean("weight_error") == pytest.approx(here.mean("weight_error"), rel=0.05)
        assert there.mean("output_error") == pytest.approx(here.mean("output_error"), rel=0.1)


def refuse(error: Any, match: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        quantize(*arguments, device="cpu", **options)


def test_refusals_write_nothing(model: Path, calibration: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rtn = Settings.choose("rtn", group_size=32)
    refuse(ConfigError, r"gptq needs text.*--calibration FILE", model, out, GPTQ)
    static = Settings.choose("fp8", activations="static")
    refuse(ConfigError, r"fp8 with static activations needs text", model, out, static)
    refuse(CheckpointError, "does not exist", tmp_path / "nowhere", out, rtn)
    refuse(ConfigError, r"192 inputs, which --group-size 128 does not divide; use --group-size 64 or 32 or 16 or -1",
           model, out, Settings.choose("rtn"))  # fmt: skip
    short = Calibration(files=calibration.files, samples=999, length=64)
    refuse(ConfigError, r"999 samples of 64 need 63936; give more text, or use --samples \d+", model, out, GPTQ,
           calibration=short)  # fmt: skip
    long = Calibration(files=calibration.files, samples=1, length=513)
    refuse(ConfigError, r"longer than the model's context; use at most 512", model, out, GPTQ, calibration=long)
    missing = Calibration(files=(tmp_path / "no.txt",), length=64)
    refuse(ConfigError, r"--calibration .*no\.txt cannot be read", model, out, GPTQ, calibration=missing)
    for context, sentence in (
        (512, "does not fit the model's 512; use 511"),
        (1, "windows of 1 tokens cannot have a stride of 0"),
    ):
        refuse(ConfigError, sentence, model, out, rtn, held_out=HeldOut(text="some text", context=context))
    some = Settings.choose("rtn", group_size=32, ignore=("re:.*q_proj",))
    refuse(ConfigError, r"ignore all of .*q_proj, .*k_proj, .*v_proj, or none", model, out, some)
    everything = Settings.choose("rtn", ignore=("model.layers",))
    refuse(ConfigError, "nothing would be quantized", model, out, everything)
    assert not out.exists()


def test_quantized_checkpoint_is_an_error(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "once", Settings.choose("int8"), device="cpu")
    refuse(CheckpointError, r"is quantized already \(compressed-tensors\)", tmp_path / "once", tmp_path / "twice",
           Settings.choose("int8"))  # fmt: skip


def test_unknown_architecture_is_an_error(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt_neox")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"], "model_type": "none"}))
    refuse(PluginError, "NoSuchModel", plain, tmp_path / "out", Settings.choose("int8"))


def test_other_directories_are_not_written_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        refuse(ConfigError, "is not empty, and nothing in it is replaced", model, tmp_path / "mine",
               Settings.choose("int8"), restart=restart)  # fmt: skip
    refuse(ConfigError, "is a file", model, tmp_path / "mine" / "thesis.txt", Settings.choose("int8"))
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_created_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse(ConfigError, r"file/out cannot be written \(Not a directory\); give another directory", model,
           tmp_path / "file" / "out", Settings.choose("int8"))  # fmt: skip


def test_checkpoint_without_a_tensor_is_an_error(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    refuse(CheckpointError, r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight", broken, tmp_path / "out",
           Settings.choose("int8"))  # fmt: skip
