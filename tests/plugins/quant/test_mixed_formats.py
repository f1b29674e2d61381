"""compressed-tensors whose groups have formats of their own, written by the library, with a quantized output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from engine.testing.checkpoints import make_checkpoint

from .test_compressed_library import logprobs, quantize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}


def group(targets: list[str], form: str, inputs: Any = None, **weights: Any) -> Any:
    scheme = QuantizationScheme(targets=targets, weights=QuantizationArgs(**weights), format=form)
    scheme.input_activations = inputs
    return scheme


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", tokenizer=True, **SIZES)


def test_groups_of_packed_and_float8_modules_are_read_from_one_file(plain: Any, tmp_path: Path) -> None:
    """4 bits in the MLP, float8 in attention, 8 bits in the output layer."""
    token = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    groups = {
        "group_0": group(["re:.*mlp.*"], "pack-quantized", num_bits=4, strategy="group", group_size=32),
        "group_1": group(["re:.*self_attn.*"], "float-quantized", token, num_bits=8, type="float", strategy="channel"),
        "group_2": group(["lm_head"], "pack-quantized", num_bits=8, strategy="channel"),
    }
    compressed, decompressed = quantize(plain, tmp_path, groups, ignore=[])
    chosen, scores = logprobs(compressed)
    assert chosen == ["compressed-tensors"]
    _, expected = logprobs(decompressed)
    assert float((scores - expected).norm() / expected.norm()) < 1e-3
    _, unquantized = logprobs(plain)
    assert float((unquantized - expected).norm() / expected.norm()) > 1e-3
    assert bool(torch.isfinite(scores).all())
