"""Scales of a float8 KV cache: those of transformers' keys and values; read by the engine and by compressed-tensors."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import LayerFactory
from engine.core.quant.float8 import KVScales
from engine.core.text.tokenizer import Tokenizer
from engine.quantize.kv_cache import KVPeaks
from engine.quantize.progress import Progress
from engine.quantize.run import quantize
from engine.quantize.settings import Settings
from engine.testing.checkpoints import make_checkpoint
from tests.reference_tokens import CACHE_ARGUMENT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library's own making, when it is imported
    from compressed_tensors.quantization import QuantizationConfig

ALONE = Settings.choose("none", kv_cache="fp8")
PROMPT = [(7 * i + i * i) % 500 for i in range(40)]
CASES = {
    "alone": ("none", {}),
    "fp8": ("fp8", {}),
    "int8 weights alone": ("rtn", {"bits": 8, "group_size": 32}),
    "gptq": ("gptq", {"group_size": 32, "format": "compressed-tensors"}),
    "awq": ("awq", {"group_size": 32, "format": "compressed-tensors", "symmetric": True}),
}


def load(path: Any) -> torch.nn.Module:
    """By transformers, and compressed-tensors where config.json names it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own making
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def peaks(model: Any, samples: Any) -> list[tuple[float, float, float]]:
    """Of each layer: the largest |key| as transformers' own cache stores it, |value| as v_proj gives it, and |key|
    before the rotary embedding."""
    values, raw = [], []
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.v_proj.register_forward_hook(lambda _, __, out: values.append(out.abs().max().item()))
        keys = getattr(attention, "k_norm", attention.k_proj)
        keys.register_forward_hook(lambda _, __, out: raw.append(out.abs().max().item()))
    cache = transformers.DynamicCache()
    model(samples, **{CACHE_ARGUMENT: cache})
    keys = [layer.keys.abs().max().item() for layer in cache.layers]
    return list(zip(keys, values, raw, strict=True))


def stored_scales(path: Any) -> list[tuple[float, float]]:
    tensors = load_file(path / "model.safetensors")
    pairs = []
    for layer in range(sum(name.endswith("k_scale") for name in tensors)):
        pair = [tensors[f"model.layers.{layer}.self_attn.{letter}_scale"] for letter in "kv"]
        assert all((one.shape, one.dtype) == ((1,), torch.float32) for one in pair)
        pairs.append(tuple(one.item() for one in pair))
    return pairs


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_scales_are_the_largest_keys_and_values_over_448(architecture: str, calibration: Any, tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 10.0}  # turns every pair of numbers far within a sample
    plain = make_checkpoint(tmp_path / "plain", architecture, tokenizer=True, rope_parameters=rotary)
    report = quantize(plain, tmp_path / "out", ALONE, calibration=calibration, device="cpu")
    found = stored_scales(tmp_path / "out")
    expected = peaks(load(plain), calibration.draw(Tokenizer.open(plain), 512))
    assert len(found) == len(expected) == 2
    for (key, value), (largest_key, largest_value, unrotated) in zip(found, expected, strict=True):
        assert key * 448 == pytest.approx(largest_key, rel=1e-5)
        assert value * 448 == pytest.approx(largest_value, rel=1e-5)
        assert abs(largest_key / unrotated - 1) > 1e-4
    kept = [(layer.kv_scales.key, layer.kv_scales.value) for layer in report.layers]
    assert kept == [pytest.approx(pair, rel=1e-6) for pair in found]
    before, after = (load_file(path / "model.safetensors") for path in (plain, tmp_path / "out"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert len(after) == len(before) + 4


def test_scales_are_those_of_the_quantized_model(model: Path, calibration: Any, tmp_path: Path) -> None:
    """AWQ moves scales from o_proj's inputs into the values themselves.

    One value of each head is made far larger than the others: without scales its weights lose too much, by any
    processor's rounding.
    """
    model = shutil.copytree(model, tmp_path / "outliers")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor[::32] *= 30
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    settings = Settings.choose("awq", group_size=32, format="compressed-tensors", symmetric=True, kv_cache="fp8")
    quantize(model, tmp_path / "out", settings, calibration=calibration, device="cpu")
    found = stored_scales(tmp_path / "out")
    samples = calibration.draw(Tokenizer.open(model), 512)
    unquantized = peaks(load(model), samples)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    change_config(tmp_path / "out", {**stored, "kv_cache_scheme": None})  # or the library rounds keys and values
    expected = peaks(load(tmp_path / "out"), samples)
    for (key, value), (largest_key, largest_value, _), (_, before, _) in zip(found, expected, unquantized, strict=True):
        assert key * 448 == pytest.approx(largest_key, rel=1e-4)
        assert value * 448 == pytest.approx(largest_value, rel=1e-4)
        assert abs(largest_value / before - 1) > 0.01


@pytest.fixture
def former_cache_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers calls the cache of an attention module `cache`, let Llama's also have the former argument,
    `past_key_values`: compressed-tensors 0.20 knows attention modules by it."""
    if CACHE_ARGUMENT == "past_key_values":
        return
    attention: Any = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def renamed(self: Any, *args: Any, past_key_values: Any = None, cache: Any = None, **others: Any) -> Any:
        return forward(self, *args, cache=cache if past_key_values is None else past_key_values, **others)

    monkeypatch.setattr(attention, "forward", renamed)


@pytest.mark.parametrize("case", CASES)
def test_engine_and_library_read_the_same_model(
    case: Any,
    model: Path,
    calibration: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    former_cache_argument: None,
) -> None:
    """A float8 cache without being asked for and without a warning; the log probabilities of compressed-tensors'."""
    method, options = CASES[case]
    settings = Settings.choose(method, **options, kv_cache="fp8")
    quantize(model, tmp_path / "out", settings, calibration=calibration, device="cpu")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig(**stored).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy) == (8, "float", "tensor")
    assert (scheme.symmetric, scheme.dynamic) == (True, False)
    caplog.set_level(logging.WARNING, "engine")
    scores, kv_dtype = logprobs(tmp_path / "out")
    assert kv_dtype == "float8_e4m3fn"
    assert not caplog.records
    exact, kv_dtype = logprobs(tmp_path / "out", cache__dtype="float32")
    assert kv_dtype == "float32"
    for group in stored["config_groups"].values():
        group["input_activations"] = None  # on a CPU the engine leaves those of fp8 as they are, the library does not
    change_config(tmp_path / "out", stored)
    library = load(tmp_path / "out")
    with torch.no_grad():
        expected = library(torch.tensor([PROMPT])).logits[0].log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    rounding = (expected - exact).norm()
    assert rounding > 0.005 * exact.norm()
    assert (scores - expected).norm() < 0.05 * rounding  # a number between two codes may fall to either side


def change_config(path: Any, quantization: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def logprobs(path: Any, **settings: Any) -> Any:
    settings = {"cache__memory": "8MiB", "executor__device": "cpu", "model__dtype": "float32", **settings}
    with Engine(str(path), **settings) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        [done] = engine.generate([PROMPT], params)
        assert len(done.token_ids) == 5
        return torch.tensor([one.logprob for one in done.prompt_logprobs]), engine.cache_info.kv_dtype


class Stop(Exception):  # noqa: N818
    pass


class StopAtSecond(Progress):
    def layer(self, report: Any, total: Any) -> None:
        if report.number == 1:
            raise Stop


@pytest.mark.parametrize("method", ["none", "int8", "rtn"])
def test_resumed_run_keeps_the_scales(method: Any, model: Path, calibration: Any, tmp_path: Path) -> None:
    options = {"group_size": 32} if method == "rtn" else {}
    settings = Settings.choose(method, **options, kv_cache="fp8")
    arguments = {"calibration": calibration, "device": "cpu"}
    with pytest.raises(Stop):
        quantize(model, tmp_path / "a", settings, **arguments, progress=StopAtSecond())
    if method != "none":
        with pytest.raises(ConfigError, match=r"differs in kv_cache \('fp8', now None\)"):
            quantize(model, tmp_path / "a", Settings.choose(method, **options), **arguments)
    reports = [quantize(model, tmp_path / name, settings, **arguments) for name in "ab"]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    assert len(stored_scales(tmp_path / "a")) == 3
    assert [one.kv_scales for one in reports[0].layers] == [one.kv_scales for one in reports[1].layers]


def test_unquantized_layers_have_scales_too(model: Path, calibration: Any, tmp_path: Path) -> None:
    settings = Settings.choose("int8", ignore=("model.layers.1",), kv_cache="fp8")
    report = quantize(model, tmp_path / "out", settings, calibration=calibration, device="cpu")
    assert not report.layers[1].linears
    assert len(stored_scales(tmp_path / "out")) == 3


def test_peaks_are_over_all_keys_and_values() -> None:
    found = KVPeaks()
    keys, values = torch.tensor([1.0, -896.0]), torch.zeros(2)
    assert found.update(keys, values, 0) == (keys, values)
    found.update(torch.ones(3), torch.zeros(3), 0)
    assert found.scales("layer") == KVScales(key=2.0, value=1.0)  # zeros have any scale
    for number in (float("nan"), float("inf")):
        bad = KVPeaks()
        bad.update(keys, torch.tensor([number]), 0)
        bad.update(keys, values, 0)
        with pytest.raises(CheckpointError, match=r"values of model\.layers\.3 become (nan|inf) over the calibration"):
            bad.scales("model.layers.3")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3 gives its keys and values to no cache"):
        KVPeaks().scales("model.layers.3")


def test_refusals_write_nothing(model: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"--kv-cache fp8 needs text.*--calibration FILE.*leave out --kv-cache"):
        quantize(model, out, Settings.choose("rtn", group_size=32, kv_cache="fp8"), device="cpu")
    settings = Settings.choose("gptq", group_size=32, format="compressed-tensors", kv_cache="fp8")
    with pytest.raises(ConfigError, match=r"^gptq needs text"):
        quantize(model, out, settings, device="cpu")
    everything = Settings.choose("int8", ignore=("model.layers",), kv_cache="fp8")
    with pytest.raises(ConfigError, match=r"nothing would be quantized; --method none --kv-cache fp8 is for"):
        quantize(model, out, everything, calibration=calibration, device="cpu")
    named = LayerFactory.attention
    monkeypatch.setattr(LayerFactory, "attention", lambda *arguments, **more: named(*arguments[:-1], **more))
    with pytest.raises(CheckpointError, match=r"gives its attention layers no names"):
        quantize(model, out, ALONE, calibration=calibration, device="cpu")
    assert not out.exists()


def test_checkpoint_with_a_quantized_cache_only_counts_as_quantized(
    model: Path, calibration: Any, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    quantize(model, once, ALONE, calibration=calibration, device="cpu")
    with pytest.raises(CheckpointError, match=r"is quantized already \(compressed-tensors\)"):
        quantize(once, tmp_path / "twice", Settings.choose("int8"), device="cpu")
    shutil.rmtree(once)
