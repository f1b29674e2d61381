"""Checkpoints of every format in whole models, against the same weights dequantized, in float32."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError
from engine.testing.checkpoints import make_checkpoint

from .packers import Weight, quantize_checkpoint

PROMPT = [(37 * place) % 500 for place in range(40)]
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


def compressed(**weights: Any) -> Any:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


CASES = {
    "gptq-32": (GPTQ | {"group_size": 32}, {"group_size": 32}),
    "gptq-64": (GPTQ | {"group_size": 64}, {"group_size": 64}),
    "gptq-128": (GPTQ | {"group_size": 128}, {"group_size": 128}),
    "gptq-channel": (GPTQ | {"group_size": -1}, {"group_size": -1}),
    "gptq-asymmetric": (GPTQ | {"group_size": 32, "sym": False}, {"symmetric": False}),
    "gptq-8-bits": (GPTQ | {"bits": 8, "group_size": 64}, {"bits": 8, "group_size": 64}),
    "gptq-8-bits-asymmetric": (GPTQ | {"bits": 8, "group_size": 32, "sym": False}, {"bits": 8, "symmetric": False}),
    "gptq-act-order": (GPTQ | {"group_size": 32, "desc_act": True}, {"ordered": True}),
    "gptq-act-order-each": (
        GPTQ | {"group_size": 32, "desc_act": True, "sym": False},
        {"ordered": True, "symmetric": False, "each": True},
    ),
    "gptq-v2": (
        GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        {"symmetric": False, "version": 2},
    ),
    "gptq-v2-by-v1s-name": (GPTQ | {"group_size": 32, "checkpoint_format": "gptq"}, {"version": 2}),
    "gptq-no-g-idx": (GPTQ | {"group_size": 32}, {"stored_order": False}),
    "awq-32": (AWQ | {"group_size": 32}, {"symmetric": False}),
    "awq-128": (AWQ | {"group_size": 128}, {"symmetric": False, "group_size": 128}),
    "awq-older-names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        {"symmetric": False, "group_size": 64},
    ),
    "compressed-32": (compressed(group_size=32), {}),
    "compressed-channel": (compressed(strategy="channel"), {"group_size": -1}),
    "compressed-asymmetric": (compressed(group_size=64, symmetric=False), {"group_size": 64, "symmetric": False}),
    "compressed-8-bits": (
        compressed(group_size=64, num_bits=8, symmetric=False),
        {"group_size": 64, "bits": 8, "symmetric": False},
    ),
    "compressed-actorder": (compressed(group_size=32, actorder="group"), {"ordered": True}),
}


def maker(method: Any, *, each: bool = False, version: int = 1, stored_order: bool = True, **options: Any) -> Any:
    """Weights with inputs in one order, for all layers or for each its own."""

    def make(module: Any, shape: Any) -> Any:
        weight = Weight(*shape, seed=sum(module.encode()) if each else shape[1], **options)
        symmetric, ordered = options.get("symmetric", True), options.get("ordered", False)
        packed = {
            "gptq": functools.partial(weight.gptq, version=version, stored_order=stored_order),
            "awq": weight.awq,
            "compressed-tensors": functools.partial(weight.compressed, symmetric=symmetric, ordered=ordered),
        }[method]
        return packed(), weight.plain

    return make


def write(directory: Any, quantization: Any, options: Any, unquantized: Any = ()) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain = make_checkpoint(directory / "plain", "llama", tokenizer=True, **sizes)
    make = maker(quantization["quant_method"], **options)
    quantize_checkpoint(plain, directory / "quantized", quantization, make, unquantized)
    return plain, directory / "quantized"


def logprobs(path: Any, tokens: Any = PROMPT, **settings: Any) -> Any:
    """Of the prompt's tokens, greedy tokens after it, and the name of the method that served."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    settings = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "8MiB", **settings}
    with Engine(model=str(path), **settings) as engine:
        completion = engine.generate([tokens], wanted)[0]
        chosen = {choice.extension_point: choice.name for choice in engine.parts.choices}
    return torch.tensor([one.logprob for one in completion.prompt_logprobs]), completion.token_ids, chosen["quant"]


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_those_of_dequantized_weights(tmp_path: Path, case: Any) -> None:
    quantization, options = CASES[case]
    plain, quantized = write(tmp_path, quantization, options)
    expected, expected_tokens, _ = logprobs(plain)
    found, tokens, method = logprobs(quantized)
    assert method == quantization["quant_method"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert tokens == expected_tokens


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """One zero point of one module off by one."""
    plain, quantized = write(tmp_path, GPTQ | {"group_size": 32, "sym": False}, {"symmetric": False})
    expected = logprobs(plain)[0]
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.qzeros"][0, 0] ^= 1
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    assert float((logprobs(quantized)[0] - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("case", ["gptq-32", "awq-32", "compressed-asymmetric"])
def test_listed_modules_are_not_quantized(tmp_path: Path, case: str) -> None:
    quantization, options = CASES[case]
    alone = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    listed = {
        "gptq": {"dynamic": {r"-:.*layers\.1\.mlp\..*": {}}},
        "awq": {"modules_to_not_convert": ["model.layers.1.mlp"]},
        "compressed-tensors": {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\..*"]},
    }[quantization["quant_method"]]
    plain, quantized = write(tmp_path, quantization | listed, options, alone)
    torch.testing.assert_close(logprobs(quantized)[0], logprobs(plain)[0], rtol=1e-5, atol=1e-5)


def test_dynamic_gives_modules_other_widths_and_groups(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen2", hidden_size=128, intermediate_size=256, tokenizer=True)
    overrides = {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, r".*layers\.0\.self_attn": {"group_size": -1}}

    def make(module: Any, shape: Any) -> Any:
        if module.endswith("down_proj"):
            weight = Weight(*shape, bits=8, group_size=64)
        else:
            weight = Weight(*shape, group_size=-1 if "layers.0.self_attn" in module else 32)
        return weight.gptq(), weight.plain

    quantize_checkpoint(plain, tmp_path / "quantized", GPTQ | {"group_size": 32, "dynamic": overrides}, make)
    torch.testing.assert_close(logprobs(tmp_path / "quantized")[0], logprobs(plain)[0], rtol=1e-5, atol=1e-5)


def test_zero_biases_are_accepted(tmp_path: Path) -> None:
    plain, quantized = write(tmp_path, *CASES["gptq-32"])
    expected = logprobs(plain)[0]
    tensors = load_file(quantized / "model.safetensors")
    bias = "model.layers.0.self_attn.o_proj.bias"
    save_file(tensors | {bias: torch.zeros(128)}, quantized / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logprobs(quantized)[0], expected, rtol=1e-5, atol=1e-5)
    save_file(tensors | {bias: torch.ones(128)}, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj\.bias is not 0"):
        logprobs(quantized)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("gptq-128", "bfloat16"),
        ("gptq-32", "float16"),
        ("gptq-8-bits-asymmetric", "bfloat16"),
        ("gptq-act-order", "bfloat16"),
        ("gptq-act-order-each", "bfloat16"),
        ("awq-128", "float16"),
        ("compressed-channel", "bfloat16"),
    ],
)
def test_as_good_on_a_gpu_as_plain_weights_of_the_same_type(tmp_path: Path, case: str, dtype: str) -> None:
    """But for luck: these are few numbers, rounded at other places."""
    plain, quantized = write(tmp_path, *CASES[case])
    exact = logprobs(plain)[0]
    usual, found = (
        logprobs(path, executor__device="cuda", model__dtype=dtype)[0] - exact for path in (plain, quantized)
    )
    assert float(found.norm()) < 3 * float(usual.norm()) + 1e-3
