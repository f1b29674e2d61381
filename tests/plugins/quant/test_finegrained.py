"""Weights that transformers' FineGrainedFP8 has quantized, against what transformers dequantizes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config
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
    stored = json.loads(json.dumps({**config.to_dict(), "quant_method": "fp8"}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stored}))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    method = Fp8.from_checkpoint(checkpoint.quantization, None)
    layers = LayerFactory(dtype="float32", device="cpu", quant=method)
    layer = layers.linear([("q", 256)], 384)
    load_weights(layers, SafetensorsSource(checkpoint))
    found = layer(torch.eye(384)).T
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
