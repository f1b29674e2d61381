"""Checkpoints written by the compressed-tensors library, against the weights that it makes of them itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint

PROMPT = [(7 * i + i * i) % 500 for i in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes = {"hidden_size": 160, "head_dim": 24, "intermediate_size": 200}
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", tokenizer=True, **sizes)


def extremes(weight: Any, args: Any) -> Any:
    strategy = args.strategy
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    blocks = [list(row.split(128, 1)) for row in weight.split(128, 0)]
    return tuple(
        torch.tensor([[float(reduce(block)) for block in row] for row in blocks]) for reduce in (torch.min, torch.max)
    )


def write(model: Any, path: Any) -> None:
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def quantize(plain: Any, tmp_path: Any, groups: Any, ignore: Any = ("lm_head",)) -> Any:
    """Quantize by the library; returns the compressed checkpoint, and one of what it decompresses to.

    groups: config_groups, by name of the group or preset.
    """
    with warnings.catch_warnings():  # here, so that only the process that runs these tests imports the library
        warnings.simplefilter("ignore")  # of the library's own making, when it is imported
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.quantization.utils import calculate_qparams
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    paths = [tmp_path / "compressed", tmp_path / "decompressed"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    for path in paths:
        model.config.save_pretrained(path)
        tokenizer.save_pretrained(path)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=list(ignore)))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scale, _ = calculate_qparams(*extremes(module.weight.detach(), scheme.weights), scheme.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype).reshape(module.weight_scale.shape)
            if getattr(module, "input_scale", None) is not None:
                module.input_scale.data = torch.full_like(module.input_scale.data, 0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    write(model, paths[0])
    compressor.update_config(str(paths[0]))
    compressor.decompress_model(model)
    for name in model.state_dict():
        if name.endswith(("_scale", "weight_shape")):
            owner, _, attribute = name.rpartition(".")
            delattr(model.get_submodule(owner), attribute)
    write(model, paths[1])
    return paths


def logprobs(path: Any, **settings: Any) -> Any:
    common = {"cache__memory": "8MiB", "executor__device": "cpu", "model__dtype": "float32"}
    with Engine(str(path), **common, **settings) as engine:
        [done] = engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        chosen = [choice.name for choice in engine.parts.choices if choice.extension_point == "quant"]
        return chosen, torch.tensor([one.logprob for one in done.prompt_logprobs])


@pytest.mark.parametrize(
    ("preset", "method", "limit"),
    [("FP8", "fp8", 1e-3), ("FP8_DYNAMIC", "fp8", 1e-3), ("FP8_BLOCK", "fp8", 1e-3), ("INT8", "int8", 0.03)],
)
def test_presets_are_read_as_the_library_decompresses_them(
    preset: str, method: str, limit: float, plain: Any, tmp_path: Path
) -> None:
    compressed, decompressed = quantize(plain, tmp_path, {preset: ["Linear"]})
    chosen, scores = logprobs(compressed)
    assert chosen == [method]
    _, expected = logprobs(decompressed)
    assert float((scores - expected).norm() / expected.norm()) < limit
    _, unquantized = logprobs(plain)
    assert float((unquantized - expected).norm() / expected.norm()) > 1e-3
