"""Checkpoints that the programs themselves have made (produced/make.py), against what those programs compute."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint

FOLDER = Path(__file__).parent / "produced"
PROMPT = [(7 * i + i * i) % 60 for i in range(24)]
METHODS = {
    "auto-round": "auto-round",
    "auto-round-awq": "auto-round",
    "auto-round-gptq": "auto-round",
    "modelopt-fp8": "modelopt",
    "modelopt-fp8-channel": "modelopt",
    "modelopt-int4-awq": "modelopt",
}
"""Folder -> the method that reads the checkpoint."""
TOLERANCE = {"auto-round-awq": 1e-2}
"""Of log probabilities, where it is more than 1e-4: AutoRound dequantizes these weights in float16."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of any tokens: log probabilities are returned with their texts."""
    return str(make_checkpoint(tmp_path_factory.mktemp("tokenizer") / "model", "llama", tokenizer=True))


def logprobs(path: Path, tokenizer: str) -> Any:
    """The method that was chosen, and log probabilities of PROMPT's tokens but the first."""
    settings = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "1MiB"}
    settings["model__tokenizer"] = tokenizer
    with Engine(str(path), **settings) as engine:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        [done] = engine.generate([PROMPT], params)
        [chosen] = [choice.name for choice in engine.parts.choices if choice.extension_point == "quant"]
        return chosen, torch.tensor([one.logprob for one in done.prompt_logprobs])


@pytest.mark.parametrize("name", METHODS)
def test_produced_checkpoint_computes_what_its_program_does(name: str, tokenizer: str) -> None:
    chosen, found = logprobs(FOLDER / name, tokenizer)
    assert chosen == METHODS[name]
    expected = load_file(FOLDER / name / "expected.safetensors")["logprobs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE.get(name, 1e-4))


def test_modelopt_checkpoint_without_a_quantization_config_is_read(tokenizer: str, tmp_path: Path) -> None:
    """As older versions write: config.json says nothing of the quantization."""
    path = copytree(FOLDER / "modelopt-int4-awq", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    chosen, found = logprobs(path, tokenizer)
    assert chosen == "modelopt"
    expected = load_file(path / "expected.safetensors")["logprobs"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
