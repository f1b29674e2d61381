"""Engines with fused kernels compared with plain ones, and when fused kernels are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError
from engine.core.plugin_host.derived import fused_kernels
from engine.testing.checkpoints import make_checkpoint

PROMPTS = [[(11 * row + 5 * column) % 500 for column in range(2 + 5 * row)] for row in range(2)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CPU, GPU = DeviceInfo(type="cpu"), DeviceInfo(type="cuda", capability=(9, 0))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("qwen2", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 32, "rope_parameters": YARN})],
)
def test_fused_engine_samples_the_same_greedy_tokens(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "model", architecture, tokenizer=True, num_hidden_layers=1, **config)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    settings: dict[str, Any] = {"model__dtype": "float32", "cache__memory": "4MiB", "attention": "torch"}
    settings["executor__kernel_cache"] = str(tmp_path / "kernels")
    found = {}
    for kernels in ("plain", "fused"):
        with Engine(model=str(path), executor__kernels=kernels, **settings) as engine:
            found[kernels] = [list(completion.token_ids) for completion in engine.generate(PROMPTS, greedy)]
    assert found["fused"] == found["plain"]


def config(kernels: str) -> EngineConfig:
    return EngineConfig(executor=ExecutorConfig(kernels=kernels))


def test_fused_kernels_depends_on_setting_device_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused_kernels(config("plain"), GPU)
    assert fused_kernels(config("auto"), GPU)
    assert not fused_kernels(config("auto"), CPU)
    assert fused_kernels(config("fused"), GPU)
    monkeypatch.setattr("engine.core.plugin_host.derived.find_spec", lambda name: None)
    assert not fused_kernels(config("auto"), GPU)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        fused_kernels(config("fused"), GPU)


def test_fused_kernels_raises_on_a_cpu_without_the_interpreter() -> None:
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "from engine.core.config import EngineConfig, ExecutorConfig\n"
        "from engine.core.device import DeviceInfo\n"
        "from engine.core.plugin_host.derived import fused_kernels\n"
        "fused_kernels(EngineConfig(executor=ExecutorConfig(kernels='fused')), DeviceInfo(type='cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "no compiler for a CPU" in done.stderr


def test_plain_engine_imports_no_kernels(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3", tokenizer=True)
    code = (
        "import sys\nfrom engine.core import Engine, SamplingParams\n"
        f"engine = Engine({str(path)!r}, executor__kernels='plain', cache__memory='4MiB', executor__device='cpu')\n"
        "engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))\n"
        "print([name for name in sys.modules if name.startswith('engine.ops.') and name.count('.') == 3])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_logprobs_of_fused_kernels_are_close_to_float32(tmp_path: Path, architecture: str) -> None:
    """Fused kernels round to bfloat16 less often than plain ones, so they are closer to float32."""
    path = make_checkpoint(tmp_path / "model", architecture, tokenizer=True, initializer_range=0.05)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for kernels, dtype in (("plain", "float32"), ("plain", "bfloat16"), ("fused", "bfloat16")):
        settings: dict[str, Any] = {"executor__kernels": kernels, "model__dtype": dtype, "attention": "torch"}
        with Engine(model=str(path), cache__memory="4MiB", **settings) as engine:
            [completion] = engine.generate(PROMPTS[1:], params)
        found.append(torch.tensor([logprob for _, logprob in completion.logprobs[0].top]))
    assert float((found[2] - found[0]).abs().max()) < 2 * float((found[1] - found[0]).abs().max()) + 0.02
