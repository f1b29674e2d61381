"""Whole checkpoints in every format, through the engine on a CPU, against their dequantized float32 twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError, ConfigError, PluginError
from engine.testing.checkpoints import make_checkpoint

from .w8_packers import (
    compressed,
    fp8_blocks,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    number,
    quantized,
    with_tensors,
)

PROMPT = [(7 * i + i * i) % 500 for i in range(40)]
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FP8_DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": None}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
TOKEN = number("float", "token", dynamic=True)
CT_TENSOR = compressed("float-quantized", number("float", "tensor"), number("float", "tensor"))
CT_CHANNEL = compressed("float-quantized", number("float", "channel"), TOKEN)
CT_BLOCK = compressed(
    "float-quantized",
    number("float", "block", block_structure=[128, 128]),
    number("float", "group", dynamic=True, group_size=128),
)
CT_INT8 = compressed("int-quantized", number("int", "channel"), number("int", "token", dynamic=True))

FP8 = {
    "fp8 per tensor": (fp8_per_tensor(), FP8_DYNAMIC),
    "fp8 per tensor, scalars": (fp8_per_tensor(shape=()), FP8_DYNAMIC),
    "fp8 static": (fp8_per_tensor(input_scale=0.01, shape=()), FP8_STATIC),
    "fp8 static, other names": (
        fp8_per_tensor("weight_scale_inv", (), 0.01, "activation_scale"),
        FP8_STATIC | {"weight_block_size": None},
    ),
    "fp8 blocks": (fp8_blocks("weight_scale_inv"), FP8_BLOCKS),
    "fp8 blocks, powers of two": (fp8_blocks("weight_scale_inv", powers=True), FP8_BLOCKS | {"scale_fmt": "ue8m0"}),
    "fbgemm": (fp8_per_channel, FBGEMM),
    "compressed-tensors per tensor": (fp8_per_tensor(input_scale=0.01), CT_TENSOR),
    "compressed-tensors per channel": (fp8_per_channel, CT_CHANNEL),
    "compressed-tensors blocks": (fp8_blocks("weight_scale"), CT_BLOCK),
    "compressed-tensors weight-only": (
        fp8_per_channel,
        compressed("naive-quantized", number("float", "channel"), None),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its merged parts end within blocks: 96 rows of q, 48 of k and v, 200 of gate and up; 96 and 200 inputs."""
    sizes = {"hidden_size": 160, "head_dim": 24, "intermediate_size": 200}
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", tokenizer=True, **sizes)


def open_engine(path: Any, **settings: Any) -> Any:
    return Engine(str(path), cache__memory="8MiB", executor__device="cpu", model__dtype="float32", **settings)


def logprobs(path: Any, **settings: Any) -> Any:
    """Of the prompt's tokens and of some greedy ones, and which ones."""
    with open_engine(path, **settings) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        [done] = engine.generate([PROMPT], params)
        scores = [one.logprob for one in (*done.prompt_logprobs, *done.logprobs)]
        return list(done.token_ids), torch.tensor(scores)


@pytest.mark.parametrize("case", FP8)
def test_fp8_checkpoints_compute_what_their_dequantized_twins_do(case: Any, plain: Any, tmp_path: Path) -> None:
    packer, config = FP8[case]
    stored, meant = quantized(plain, tmp_path, packer, config)
    tokens, scores = logprobs(stored)
    expected_tokens, expected = logprobs(meant)
    assert tokens == expected_tokens
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_int8_checkpoints_compute_what_their_dequantized_twins_do(plain: Any, tmp_path: Path) -> None:
    stored, meant = quantized(plain, tmp_path, int8_per_channel, CT_INT8)
    _, expected = logprobs(meant)
    _, scores = logprobs(stored)
    assert 0 < float((scores[:39] - expected[:39]).norm() / expected[:39].norm()) < 0.03  # activations are rounded
    _, scores = logprobs(stored, quant__options={"activations": "none"})
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("fp8", {"granularity": "tensor"}, 0.1),
        ("fp8", {"granularity": "channel"}, 0.1),
        ("fp8", {"granularity": "block"}, 0.1),
        ("int8", {}, 0.03),
        ("int8", {"activations": "none"}, 0.03),
    ],
)
def test_quantizing_while_loading_changes_logprobs_little(name: str, options: Any, limit: float, plain: Any) -> None:
    _, expected = logprobs(plain)
    _, scores = logprobs(plain, quant__name=name, quant__options=options)
    assert 1e-5 < float((scores[:39] - expected[:39]).norm() / expected[:39].norm()) < limit


def test_listed_modules_are_not_quantized(plain: Any, tmp_path: Path) -> None:
    def alone(module: Any) -> Any:
        return "layers.0.self_attn" in module or "down_proj" in module

    names = ["model.layers.0.self_attn", "down_proj", "lm_head"]
    stored, meant = quantized(
        plain, tmp_path / "fp8", fp8_per_tensor(), FP8_DYNAMIC | {"modules_to_not_convert": names}, unquantized=alone
    )
    assert logprobs(stored)[0] == logprobs(meant)[0]
    config = {**CT_CHANNEL, "ignore": ["re:.*layers\\.0\\.self_attn.*", "re:.*down_proj$", "lm_head"]}
    stored, meant = quantized(plain, tmp_path / "compressed", fp8_per_channel, config, unquantized=alone)
    assert logprobs(stored)[0] == logprobs(meant)[0]


def test_config_groups_may_be_float8_and_int8(plain: Any, tmp_path: Path) -> None:
    def packer(module: Any, weight: Any) -> Any:
        return (int8_per_channel if "mlp" in module else fp8_per_channel)(module, weight)

    def group(targets: Any, kind: Any) -> Any:
        return {
            "targets": targets,
            "weights": number(kind, "channel"),
            "input_activations": None,
            "format": f"{kind}-quantized",
        }

    groups = {"group_0": group(["Linear"], "float"), "group_1": group(["re:.*mlp.*"], "int")}
    stored, meant = quantized(
        plain, tmp_path, packer, {**CT_CHANNEL, "format": "mixed-precision", "config_groups": groups}
    )
    tokens, scores = logprobs(stored)
    expected_tokens, expected = logprobs(meant)
    assert tokens == expected_tokens
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_kv_cache_scales_are_read_with_the_weights(
    names: Any, plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def more(module: Any) -> Any:
        return {} if "k_proj" not in module else {f"../{name}": torch.tensor([0.02]) for name in names}

    stored, meant = quantized(
        plain,
        tmp_path,
        with_tensors(fp8_per_channel, more),
        {**CT_CHANNEL, "kv_cache_scheme": number("float", "tensor")},
    )
    file = stored / "model.safetensors"
    tensors = {name.replace("k_proj.../", ""): tensor for name, tensor in load_file(file).items()}
    assert any(name.endswith(names[0]) for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    expected = logprobs(meant)[1]
    torch.testing.assert_close(logprobs(stored, cache__dtype="float32")[1], expected, rtol=1e-4, atol=1e-4)
    assert "would use them" in caplog.text
    caplog.clear()
    error = (logprobs(stored)[1][:39] - expected[:39]).norm() / expected[:39].norm()
    assert 1e-4 < error < 0.1
    assert not caplog.records


def broken(plain: Any, tmp_path: Any, change: Any, packer: Any = fp8_per_channel, config: Any = CT_CHANNEL) -> Any:
    stored, _ = quantized(plain, tmp_path, packer, config)
    file = stored / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return stored


Q = "model.layers.1.self_attn.q_proj"


def set_to(name: Any, value: Any) -> Any:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q}.weight_scale"), f"lacks 1 .*{Q}.weight_scale"),
        (set_to(f"{Q}.weight_scale", torch.ones(95, 1)), rf"{Q}.weight_scale .* has shape \[95, 1\].* \[96, 1\]"),
        (set_to(f"{Q}.weight", torch.ones(96, 160)), f"{Q}.weight .* type float32.* float8_e4m3fn"),
        (set_to(f"{Q}.weight_scale", torch.full((96, 1), float("nan"))), f"{Q}.weight_scale .*not finite"),
        (set_to(f"{Q}.input_scale", torch.ones(1)), f"neither the model nor quant '.*' of .* knows: {Q}.input_scale"),
    ],
)
def test_broken_tensors_are_named(change: Any, message: str, plain: Any, tmp_path: Path) -> None:
    path = broken(plain, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_engine(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q}.weight_scale"), f"no scales for {Q}"),
        (set_to(f"{Q}.weight_scale_inv", torch.ones(1)), f"two scales for {Q}"),
        (lambda tensors: tensors.pop(f"{Q}.input_scale"), f"no scales for {Q}: want .*input_scale"),
    ],
)
def test_scales_that_may_have_two_names(change: Any, message: str, plain: Any, tmp_path: Path) -> None:
    path = broken(plain, tmp_path, change, fp8_per_tensor(input_scale=0.01), FP8_STATIC)
    with pytest.raises(CheckpointError, match=message):
        open_engine(path)


def test_merged_layer_with_an_unquantized_part_is_refused(plain: Any, tmp_path: Path) -> None:
    stored, _ = quantized(
        plain,
        tmp_path,
        fp8_per_channel,
        {**CT_CHANNEL, "ignore": ["re:.*k_proj", "lm_head"]},
        unquantized=lambda module: module.endswith("k_proj"),
    )
    with pytest.raises(CheckpointError, match=r"q_proj as fp8 weights per channel but .*k_proj as unquantized"):
        open_engine(stored)


def test_auto_chooses_by_the_checkpoint(plain: Any, tmp_path: Path) -> None:
    for name, packer, config in (("fp8", fp8_per_channel, CT_CHANNEL), ("int8", int8_per_channel, CT_INT8)):
        stored, _ = quantized(plain, tmp_path / name, packer, config)
        with open_engine(stored) as engine:
            assert [choice.name for choice in engine.parts.choices if choice.extension_point == "quant"] == [name]


def test_options_that_contradict_the_checkpoint_are_refused(plain: Any, tmp_path: Path) -> None:
    stored, _ = quantized(plain, tmp_path, fp8_per_channel, CT_CHANNEL)
    with pytest.raises(ConfigError, match=r"granularity is 'block'.*quantized already"):
        open_engine(stored, quant__name="fp8", quant__options={"granularity": "block"})
    with pytest.raises(ConfigError, match="activations"):
        open_engine(stored, quant__name="fp8", quant__options={"activations": "int3"})
    with pytest.raises(PluginError, match="float8 weights; choose --quant fp8"):
        open_engine(stored, quant__name="int8")
