"""Mixtures of experts: served as they were written, with what stays unquantized named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError, ConfigError
from engine.quantize.calibration import Calibration
from engine.quantize.run import quantize
from engine.quantize.settings import Settings
from engine.testing.checkpoints import make_checkpoint

PROMPT = [(7 * i + i * i) % 500 for i in range(40)]
SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, **SIZES},
    "qwen3_moe": {"num_experts": 4, **SIZES},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        **SIZES,
    },
}
EXPERTS = {**dict.fromkeys(FAMILIES, "mlp.experts."), "mixtral": "block_sparse_moe.experts."}
ROUTERS = {
    "mixtral": ["block_sparse_moe.gate"],
    "qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"],
    "gpt_oss": ["mlp.router"],
    "qwen3_moe": ["mlp.gate"],
    "deepseek_v2": ["mlp.gate"],
}
METHODS = {"fp8": (Settings.choose("fp8"), 0.15), "rtn": (Settings.choose("rtn", group_size=32), 0.6)}
"""Settings, and the largest error of log probabilities."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family, by its name."""
    root = tmp_path_factory.mktemp("plain")
    return {name: make_checkpoint(root / name, name, tokenizer=True, **config) for name, config in FAMILIES.items()}


def logprobs(path: Path) -> torch.Tensor:
    settings: dict[str, Any] = {
        "cache__memory": "8MiB",
        "executor__device": "cpu",
        "model__dtype": "float32",
        "model__max_len": 128,
    }
    with Engine(str(path), **settings) as engine:
        [done] = engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        return torch.tensor([one.logprob for one in done.prompt_logprobs])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_experts_are_served(family: str, method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    settings, largest = METHODS[method]
    plain, out = checkpoints[family], tmp_path / "out"
    report = quantize(plain, out, settings, device="cpu")
    expected = logprobs(plain)
    error = float((logprobs(out) - expected).norm() / expected.norm())
    assert 1e-4 < error < largest
    names = [one.name for layer in report.layers for one in layer.linears]
    experts = [name for name in names if EXPERTS[family] in name]
    routers = [f"model.layers.{n}.{name}" for n in (0, 1) for name in ROUTERS[family]]
    if family == "deepseek_v2":  # whose first layer is dense
        routers = routers[1:]
    stacked = [f"model.layers.{n}.mlp.experts" for n in (0, 1)] if family == "gpt_oss" else []
    assert len(experts) == (0 if stacked else 4 * 3 * len(report.layers[family == "deepseek_v2" :]))
    assert sorted(report.unquantized) == sorted([*routers, *stacked])
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [rf"re:{re.escape(name)}(\..+)?$" for name in stacked]
    assert sorted(ignored) == sorted(["lm_head", *routers, *patterns])


@pytest.mark.parametrize(
    ("method", "form"), [("fp8", "compressed-tensors"), ("rtn", "compressed-tensors"), ("rtn", "gptq"), ("rtn", "awq")]
)
def test_ignored_experts_stay_as_they_are(method: str, form: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    plain, out = checkpoints["qwen2_moe"], tmp_path / "out"
    more = {} if method == "fp8" else {"group_size": 32, "symmetric": form != "awq"}
    settings = Settings.choose(method, format=form, ignore=("re:.*\\.experts\\.",), **more)
    report = quantize(plain, out, settings, device="cpu")
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert all(torch.equal(before[name], after[name]) for name in experts)
    assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} <= set(report.unquantized)
    assert len(report.layers[0].linears) == 7
    expected = logprobs(plain)
    assert 1e-4 < float((logprobs(out) - expected).norm() / expected.norm()) < METHODS[method][1]


def test_experts_ignored_in_part_are_an_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    settings = Settings.choose("fp8", ignore=("re:.*experts.1.down_proj",))
    with pytest.raises(ConfigError, match=r'so ignore all experts \("re:\.\*\\\.experts\\\."\), or none'):
        quantize(checkpoints["qwen3_moe"], tmp_path / "out", settings, device="cpu")


def test_group_size_that_does_not_fit_experts_is_an_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    settings = Settings.choose("rtn", group_size=64)
    with pytest.raises(
        ConfigError, match=r'experts\.0\.down_proj has 32 inputs.* or give --ignore "re:\.\*\\\.experts'
    ):
        quantize(checkpoints["qwen3_moe"], tmp_path / "out", settings, device="cpu")


def test_calibration_text_for_experts_that_are_modules_is_an_error(
    checkpoints: dict[str, Path], calibration: Calibration, tmp_path: Path
) -> None:
    """Also where they are to stay as they are."""
    for settings in (
        Settings.choose("fp8"),
        Settings.choose("gptq", group_size=32, ignore=(r"re:.*\.experts\.",)),
        Settings.choose("none", kv_cache="fp8"),
    ):
        with pytest.raises(CheckpointError, match="has a module per expert, through which calibration text cannot be"):
            quantize(checkpoints["qwen3_moe"], tmp_path / "out", settings, calibration=calibration, device="cpu")
    assert not (tmp_path / "out").exists()


def test_experts_that_could_not_be_served_once_quantized_are_an_error(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "olmoe", num_experts=4, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"could not serve .* once quantized: OlmoeForCausalLM has quantized exp"):
        quantize(plain, tmp_path / "out", Settings.choose("fp8"), device="cpu")
    assert not (tmp_path / "out").exists()
