"""Checkpoints of NVIDIA ModelOpt: what their files say, and what their tensors mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.layers.linear import PlainKernel
from engine.core.quant.base import LinearPart, LinearSpec
from engine.core.weights import Checkpoint
from engine.plugins.models.qwen3_moe import Qwen3Moe
from engine.plugins.quant.modelopt import Int4Reader, ModelOpt
from engine.plugins.quant.w4a16 import GroupScheme
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.quant import QuantConformance

from .w8_packers import fp8_per_tensor, quantized

CPU = DeviceInfo(type="cpu")
FILE = "hf_quant_config.json"
NAME = "model.layers.1.mlp.gate_proj"


def described(algorithm: Any, **more: Any) -> Any:
    """A quantization_config of a checkpoint whose config.json has none."""
    details = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
    return {"files": {FILE: {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": details}}}


INT4 = described("W4A16_AWQ", group_size=32, has_zero_point=False, pre_quant_scale=True)


def store_int4(weight: torch.Tensor, group: int, factors: torch.Tensor | None = None) -> Any:
    """Pack two outputs per byte, number by number; and the weight that the bytes mean."""
    outputs, inputs = weight.shape
    scaled = weight if factors is None else weight / factors
    scales = scaled.view(outputs, inputs // group, group).abs().amax(2) / 7
    numbers = (scaled / scales.repeat_interleave(group, 1)).round().clamp(-8, 7)
    packed = torch.empty(outputs // 2, inputs, dtype=torch.uint8)
    for row in range(outputs // 2):
        for column in range(inputs):
            low, high = int(numbers[2 * row, column]), int(numbers[2 * row + 1, column])
            packed[row, column] = (low % 16) | (high % 16) << 4
    tensors = {"weight": packed, "weight_scale": scales}
    meant = numbers * scales.repeat_interleave(group, 1)
    if factors is not None:
        tensors["pre_quant_scale"] = factors
        meant = meant * factors
    return tensors, meant


class TestModelOptInt4(QuantConformance):
    method = ModelOpt
    checkpoint = INT4
    may_lack = ("pre_quant_scale",)

    def store(self, name: str, weight: torch.Tensor) -> Any:
        factors = torch.linspace(0.5, 2.0, weight.shape[1])
        return store_int4(weight, 32, factors * (1 + ord(name[0]) % 3))  # factors of a part of their own


EXPERTS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("algorithm", ["FP8", "W4A16_AWQ"])
def test_experts_compute_what_their_dequantized_twins_do(algorithm: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", **EXPERTS)
    pack = fp8_per_tensor(input_scale=0.01, shape=())
    if algorithm != "FP8":
        pack = lambda module, weight: store_int4(weight, 32)  # noqa: E731
    config = described(algorithm, group_size=32, exclude_modules=["lm_head", "*mlp.gate"])
    stored, meant = quantized(plain, tmp_path, pack, config)
    logits = []
    for path, quant in ((stored, ModelOpt.from_checkpoint(config, None)), (meant, None)):
        logits.append(ModelBench(Qwen3Moe, path, [list(range(12))], quant=quant).prompt_logits(0))
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 2e-5


def test_bytes_hold_an_even_output_in_their_low_half() -> None:
    spec = LinearSpec(parts=(LinearPart(name="a", out_features=2),), in_features=32, bias=False, dtype="float32")
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, :3] = torch.tensor([0xF8, 0x17, 0x90], dtype=torch.uint8)
    reader = Int4Reader(GroupScheme(bits=4, group_size=32))
    loaded = {"a.weight": packed, "a.weight_scale": torch.tensor([[2.0], [3.0]])}
    weight = reader.read(spec.parts[0], spec, loaded).dequantize(reader.scheme)
    assert weight[:, :4].tolist() == [[-16.0, 14.0, 0.0, 0.0], [-3.0, 3.0, -21.0, 0.0]]


def test_packed_inputs_are_multiplied_by_their_factors() -> None:
    """As on a GPU, where weights stay packed; merged parts may have factors of their own."""
    parts = tuple(LinearPart(name=name, out_features=32) for name in "ab")
    spec = LinearSpec(parts=parts, in_features=64, bias=False, dtype="float16")
    torch.manual_seed(0)
    loaded, meant = {}, []
    for part, most in zip(parts, (2.0, 4.0), strict=True):
        tensors, weight = store_int4(torch.randn(32, 64), 32, torch.linspace(0.5, most, 64).half())
        loaded |= {f"{part.name}.{end}": tensor for end, tensor in tensors.items()}
        meant.append(weight)
    kernel = W4A16Kernel(spec, Int4Reader(GroupScheme(bits=4, group_size=32)), WeightOnlyMatmuls())
    x = torch.randn(3, 64).half() / 8
    expected = x.double() @ torch.cat(meant).double().T
    got = kernel.apply(x, kernel.pack_weights(loaded), None).double()
    assert float((got - expected).norm() / expected.norm()) < 2e-3


def test_config_is_read_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": []}')
    assert Checkpoint.open(tmp_path).quantization is None
    (tmp_path / FILE).write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}')
    found = Checkpoint.open(tmp_path).quantization
    assert ModelOpt.refuses(found, CPU) is None
    assert ModelOpt.kv_dtype(found) == "float8_e4m3fn"
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}')
    found = Checkpoint.open(tmp_path).quantization
    assert found is not None
    assert ModelOpt.refuses(found, CPU) is None
    assert ModelOpt.refuses({"quant_method": "modelopt", "quant_algo": "FP8"}, CPU) is None
    contradiction = {**found, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert "FP8_PER_CHANNEL_PER_TOKEN, but hf_quant_config.json says FP8" in str(ModelOpt.refuses(contradiction, CPU))


@pytest.mark.parametrize(
    ("excluded", "quantized"),
    [
        (["lm_head"], True),
        (["model.layers.1*"], False),
        (["model.layers.1", "model.layers.1.*"], False),
        (["model.layers.1.mlp"], False),
        (["model.layers.11*"], True),
        ([NAME], False),
        (["*gate_proj"], False),
    ],
)
def test_excluded_modules_are_not_quantized(excluded: Any, quantized: bool) -> None:
    quant = ModelOpt.from_checkpoint(described("FP8", exclude_modules=excluded), None)
    layers = LayerFactory(dtype="float32", device="cpu", quant=quant)
    assert isinstance(layers.linear([(NAME, 16)], 16).kernel, PlainKernel) is not quantized


def test_layers_of_mixed_precision_have_formats_of_their_own() -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ", "group_size": 32, "has_zero_point": False}}
    quant = ModelOpt.from_checkpoint(described("MIXED_PRECISION", quantized_layers=layers), None)
    factory = LayerFactory(dtype="float32", device="cpu", quant=quant)
    dtypes = {name: factory.linear([(name, 64)], 64).tensors()[f"{name}.weight"].dtypes[0] for name in "abc"}
    assert dtypes == {"a": "float8_e4m3fn", "b": "uint8", "c": "float32"}


def test_kv_cache_scales_are_those_of_the_projections() -> None:
    quant = ModelOpt.from_checkpoint(described("FP8", kv_cache_quant_algo="FP8"), None)
    names = quant.kv_scales("model.layers.0.self_attn")
    assert names is not None
    assert "model.layers.0.self_attn.k_proj.k_scale" in names.keys
    assert "model.layers.0.self_attn.v_proj.v_scale" in names.values


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (described("NVFP4", group_size=16), ["'NVFP4'", "export again with ModelOpt as FP8 or INT4_AWQ"]),
        (described("W4A8_AWQ", group_size=128), ["'W4A8_AWQ'", "ModelOpt"]),
        (described("W4A16_AWQ"), ["group_size of W4A16_AWQ is None", FILE]),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, ["group_size", "next to config.json"]),
        (described("MIXED_PRECISION"), ["quantized_layers"]),
        (described("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4"}}), ["a: ", "'NVFP4'"]),
        (described("FP8", has_zero_point=True), ["has_zero_point is True"]),
        ({"quant_method": "gptq"}, ["'gptq'"]),
        (None, ["not quantized"]),
    ],
)
def test_refuses_by_name_what_it_cannot_compute(config: Any, words: Any) -> None:
    refusal = ModelOpt.refuses(config, CPU)
    assert refusal is not None
    for word in words:
        assert word in refusal
    if config is not None:
        with pytest.raises(CheckpointError):
            ModelOpt.from_checkpoint(config, None)
