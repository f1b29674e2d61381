"""Weights that transformers' FineGrainedFP8 and FbgemmFp8 have quantized, against what they mean there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import FbgemmFp8Config, FineGrainedFP8Config
from transformers.integrations import fbgemm_fp8
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from engine.core.layers import LayerFactory
from engine.core.weights import Checkpoint, SafetensorsSource, load_weights
from engine.plugins.quant.fp8 import Fp8

SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "powers of two": {"scale_fmt": "ue8m0"},
    "powers of two, as bytes": {"scale_fmt": "ue8m0"},
    "a scale per tensor": {"weight_block_size": None},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_weights_are_those_that_transformers_dequantizes(case: str, tmp_path: Path) -> None:
    config = FineGrainedFP8Config(**SETTINGS[case])
    quantizer = SimpleNamespace(quantization_config=config)
    torch.manual_seed(0)
    tensors = Fp8Quantize(quantizer).convert({"q.weight": torch.randn(256, 384)})
    expected = Fp8Dequantize(quantizer)._dequantize_one(
        tensors["q.weight"], tensors["q.weight_scale_inv"].float(), torch.float32
    )
    if case.endswith("bytes"):
        tensors["q.weight_scale_inv"] = tensors["q.weight_scale_inv"].view(torch.uint8)
    found = read_weights({**config.to_dict(), "quant_method": "fp8"}, tensors, tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_weights_that_fbgemm_has_quantized_are_those_times_the_scales(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers' conversion with FBGEMM's kernel, which needs a GPU, by its definition."""

    def quantize_per_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = weight.abs().amax(1) / 448
        return (weight / scales[:, None]).to(torch.float8_e4m3fn), scales

    monkeypatch.setattr(fbgemm_fp8, "quantize_fp8_per_row", quantize_per_row, raising=False)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(384, 256, bias=False)})
    converter = fbgemm_fp8.FbgemmFp8Quantize(None)
    tensors = converter.convert({"q.weight": [model["q"].weight.detach()]}, model=model)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    found = read_weights(FbgemmFp8Config().to_dict(), tensors, tmp_path)
    expected = tensors["q.weight"].float() * tensors["q.weight_scale"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, model["q"].weight.detach(), rtol=0.07, atol=1e-4)


def read_weights(quantization: dict[str, Any], tensors: dict[str, torch.Tensor], directory: Path) -> torch.Tensor:
    """The dequantized weights of a checkpoint of one layer, q, in float32: [256, 384]."""
    stored = json.loads(json.dumps(quantization))
    (directory / "config.json").write_text(json.dumps({"quantization_config": stored}))
    save_file(tensors, directory / "model.safetensors")
    checkpoint = Checkpoint.open(directory)
    method = Fp8.from_checkpoint(checkpoint.quantization, None)
    layers = LayerFactory(dtype="float32", device="cpu", quant=method)
    layer = layers.linear([("q", 256)], 384)
    load_weights(layers, SafetensorsSource(checkpoint))
    return layer(torch.eye(384)).T
