"""Tensors as other programs read them: hand-made packers, and the compressed-tensors library."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.core import Engine, SamplingParams
from engine.plugins.quant.w4a16 import QuantizedWeight
from engine.quantize.formats import AwqFormat, GptqFormat, PackedTensors, pack
from engine.quantize.run import quantize
from engine.quantize.settings import Settings
from tests.plugins.quant.packers import Weight, words_along_last

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library's own making, when it is imported
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

PROMPT = [(7 * i + i * i) % 500 for i in range(40)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [16, 21])
def test_pack_equals_the_reference(bits: int, columns: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, columns))
    expected = words_along_last(numbers, bits)
    assert torch.equal(pack(torch.from_numpy(numbers), bits, 1), expected)
    assert torch.equal(pack(torch.from_numpy(numbers).T, bits, 0), expected.T)


def test_packed_words_equal_known_ones() -> None:
    row = torch.arange(8)[None]
    assert pack(row, 4, 1).item() == 0x76543210
    assert pack(row, 4, 1, [0, 2, 4, 6, 1, 3, 5, 7]).item() == 0x75316420
    assert pack(torch.full((1, 8), 15), 4, 1).item() == -1


@pytest.mark.parametrize("kind", [GptqFormat, AwqFormat, PackedTensors])
@pytest.mark.parametrize("ordered", [False, True])
def test_tensors_equal_a_reference_packer(kind: Any, ordered: Any) -> None:
    if ordered and kind is not GptqFormat:
        pytest.skip("has no groups in an order of their own")
    made = Weight(16, 64, group_size=32, symmetric=False, ordered=ordered)
    settings = Settings.choose(
        "rtn", format={GptqFormat: "gptq", AwqFormat: "awq"}.get(kind), group_size=32, symmetric=False
    )
    form = kind(settings, torch.float16)
    quantized = QuantizedWeight(
        values=torch.from_numpy(made.values).to(torch.uint8),
        scales=made.scales,
        zeros=torch.from_numpy(made.zeros).to(torch.uint8),
        group_of=torch.from_numpy(made.group_of.astype(np.int32)) if ordered else None,
    )
    expected = {
        GptqFormat: lambda: made.gptq(version=2),
        AwqFormat: made.awq,
        PackedTensors: lambda: made.compressed(symmetric=False, ordered=False),
    }[kind]()
    tensors = form.encode(quantized)
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype
    if not ordered:  # a config says whether groups have an order of their own, and this one says no
        torch.testing.assert_close(form.decode(tensors, 16, 64), made.plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("act_order", ["none", "weight", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptqmodel_accepts_the_format(method: str, act_order: str, symmetric: bool) -> None:
    """The rule of GPTQModel 1.0 and later: version 1 with sym false only if `meta.quantizer` is gptqmodel."""
    order = {"act_order": act_order} if method == "gptq" else {}
    settings = Settings.choose(method, format="gptq", group_size=32, symmetric=symmetric, **order)
    config = GptqFormat(settings, torch.float16).config()
    assert config["checkpoint_format"] in ("gptq", "gptq_v2")
    assert config["sym"] or config["checkpoint_format"] != "gptq"
    zeros = torch.full((2, 8), 8 if symmetric else 0, dtype=torch.uint8)  # 0 less one is what programs differ in
    weight = QuantizedWeight(
        values=torch.zeros(8, 64, dtype=torch.uint8), scales=torch.ones(2, 8), zeros=zeros, group_of=None
    )
    stored = GptqFormat(settings, torch.float16).encode(weight)["qzeros"]
    assert stored.unique().tolist() == [0x77777777 if symmetric else 0]


CASES = {
    "fp8 tensor": ("fp8", {"granularity": "tensor"}, "fp8"),
    "fp8 static": ("fp8", {"granularity": "tensor", "activations": "static"}, "fp8"),
    "fp8 channel": ("fp8", {}, "fp8"),
    "fp8 block": ("fp8", {"granularity": "block"}, "fp8"),
    "int8": ("int8", {}, "int8"),
    "int8 static": ("int8", {"activations": "static"}, "int8"),
    "rtn": ("rtn", {}, "compressed-tensors"),
    "rtn asymmetric": ("rtn", {"symmetric": False}, "compressed-tensors"),
    "rtn 8 bits": ("rtn", {"bits": 8, "group_size": -1}, "compressed-tensors"),
    "gptq": ("gptq", {}, "gptq"),
    "gptq asymmetric": ("gptq", {"symmetric": False, "act_order": "none"}, "gptq"),
    "gptq desc_act": ("gptq", {"act_order": "group"}, "gptq"),
    "gptq desc_act asymmetric": ("gptq", {"act_order": "group", "symmetric": False}, "gptq"),
    "gptq compressed": ("gptq", {"format": "compressed-tensors"}, "compressed-tensors"),
    "awq": ("awq", {}, "awq"),
    "awq compressed": ("awq", {"format": "compressed-tensors"}, "compressed-tensors"),
}


@pytest.mark.parametrize("case", CASES)
def test_engine_and_library_read_the_same_model(case: Any, model: Path, calibration: Any, tmp_path: Path) -> None:
    """Written; served by the plugin made for it; decompressed by compressed-tensors where the format is its own."""
    method, options, plugin = CASES[case]
    if method in ("rtn", "gptq", "awq"):
        options = {"group_size": 32, **options}
    settings = Settings.choose(method, **options)
    text = calibration if settings.needs_calibration else None
    quantize(model, tmp_path / "out", settings, calibration=text, device="cpu")
    chosen, scores = logprobs(tmp_path / "out")
    assert chosen == plugin
    _, plain = logprobs(model)
    off = float((scores - plain).norm() / plain.norm())
    assert 1e-4 < off < (0.1 if settings.bits == 8 and case != "int8 static" else 0.6)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == settings.format
    if settings.format != "compressed-tensors":
        return
    if method != "int8":  # whose activations are quantized on a CPU too
        expected = decompressed_logprobs(model, tmp_path / "out", stored)
        assert float((scores - expected).norm() / expected.norm()) < 1e-4


def logprobs(path: Any) -> Any:
    settings = {"cache__memory": "8MiB", "executor__device": "cpu", "model__dtype": "float32"}
    with Engine(str(path), **settings) as engine:
        [done] = engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        [chosen] = [choice.name for choice in engine.parts.choices if choice.extension_point == "quant"]
        return chosen, torch.tensor([one.logprob for one in done.prompt_logprobs])


def decompressed_logprobs(plain: Any, path: Any, stored: Any) -> Any:
    """Of the plain model with the weights that the library makes of the checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    scheme = QuantizationConfig(**stored).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(stored["format"])
    model.load_state_dict({name: one for name, one in tensors.items() if "_proj" not in name}, strict=False)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                own = {end.removeprefix(f"{name}."): one for end, one in tensors.items() if end.startswith(f"{name}.")}
                module.weight.copy_(compressor.decompress(own, scheme)["weight"])
        scores = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return scores[range(len(PROMPT) - 1), PROMPT[1:]]
