"""Checkpoints that also read images: the language model alone equals the whole model of transformers for text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from engine.core.device import DeviceInfo
from engine.core.plugin_host import load_plugins
from engine.core.weights import Checkpoint
from engine.plugins.models.decoder_config import DecoderConfig
from engine.plugins.models.text_tower import FORMER_PREFIX, PREFIX, Gemma3Text, Mistral3Text
from engine.quantize.run import quantize
from engine.quantize.settings import Settings
from engine.testing.model_bench import ModelBench
from tests.reference_tokens import greedy_reference

from .families import FAMILIES
from .write_family import write_plain

PROMPT = [(37 * place) % 500 for place in range(40)]
KINDS = [name for name, family in FAMILIES.items() if family.reads_images]
"""Their names."""


@pytest.mark.parametrize("kind", KINDS)
def test_text_logits_equal_transformers_under_both_names_of_the_tensors(kind: str, tmp_path: Path) -> None:
    write_plain(tmp_path, kind)
    expected = greedy_reference(tmp_path, PROMPT, 1, "AutoModelForImageTextToText").logits[: len(PROMPT)]
    cls = load_plugins().models.get(FAMILIES[kind].plugin or kind).load()
    stored = Checkpoint.open(tmp_path).config
    assert cls.refuses(stored) is None
    assert cls.unknown_keys(stored) == []
    text = {**stored["text_config"], "own": 1}
    assert cls.unknown_keys({**stored, "next_to_it": 1, "text_config": text}) == ["next_to_it", "own"]
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.replace(FORMER_PREFIX, "").replace(PREFIX, ""): tensor for name, tensor in tensors.items()}
    assert any("vision" in name or "visual" in name for name in bare)
    for prefix, head in ((PREFIX, "lm_head"), (FORMER_PREFIX, "language_model.lm_head")):
        renamed = {
            f"{prefix}{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name: tensor
            for name, tensor in bare.items()
        }
        for name in [name for name in renamed if name.endswith("lm_head.weight")]:
            renamed[f"{head}.weight"] = renamed.pop(name)
        save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
        found = ModelBench(cls, tmp_path, [PROMPT]).prompt_logits(0)
        assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_one_model_accepts_each_checkpoint(kind: str) -> None:
    library: Any = transformers
    config = json.loads(
        library.AutoConfig.for_model(FAMILIES[kind].reference or kind, **FAMILIES[kind].config).to_json_string()
    )
    models = load_plugins().models
    accepting = [name for name in models.names() if models.get(name).load().refuses(config) is None]
    assert accepting == [FAMILIES[kind].plugin or kind]


def test_checkpoint_without_a_text_config_is_refused() -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    assert "lacks text_config" in (Gemma3Text.refuses(config) or "")


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_with_another_language_model_is_refused(kind: str) -> None:
    library: Any = transformers
    config = json.loads(
        library.AutoConfig.for_model(FAMILIES[kind].reference or kind, **FAMILIES[kind].config).to_json_string()
    )
    cls: Any = load_plugins().models.get(FAMILIES[kind].plugin or kind).load()
    own = config["text_config"]["model_type"]
    assert cls.refuses(config) is None
    refusal = cls.refuses({**config, "text_config": {**config["text_config"], "model_type": "phi3"}})
    assert refusal is not None
    assert "(text_config.model_type) is 'phi3'" in refusal
    assert f"{cls.architecture} with {own!r}" in refusal


def network(cls: Any, config: dict[str, Any]) -> tuple[DecoderConfig, list[tuple[list[float], float]]]:
    """What config.json describes, and the rotary frequencies of each layer."""
    shape = cls.parse(cls.normalized(config))
    ropes = [rope.frequencies() for rope in shape.ropes]
    return evolve(shape, ropes=()), [(frequencies.tolist(), factor) for frequencies, factor in ropes]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_text_config_lacks_have_the_defaults_of_transformers(kind: str) -> None:
    library: Any = transformers
    cls: Any = load_plugins().models.get(FAMILIES[kind].plugin or kind).load()
    config = {"architectures": [cls.architecture], "model_type": cls.model_type}
    full = json.loads(library.CONFIG_MAPPING[cls.text_type]().to_json_string(use_diff=False))
    written = {**full, "pad_token_id": None, "tie_word_embeddings": cls.tied}
    found, expected = ({**config, "text_config": text} for text in ({"model_type": cls.text_type}, written))
    assert cls.refuses(found) is None
    assert cls.spec(found) == cls.spec(expected)
    assert network(cls, found) == network(cls, expected)


def test_gemma_3_is_read_from_the_keys_that_published_files_have() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    assert Gemma3Text.refuses(config) is None
    assert Gemma3Text.unknown_keys(config) == []
    spec = Gemma3Text.spec(config)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert (spec.hidden_size, spec.num_layers, spec.max_len, spec.scale) == (2560, 34, 131072, 1 / 16)
    assert spec.sliding_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with former prefixes, as transformers saves it."""
    path = tmp_path_factory.mktemp("mistral3") / "plain"
    write_plain(path, "mistral3")
    names = load_file(path / "model.safetensors")
    assert any(name.startswith(FORMER_PREFIX) for name in names)
    assert not any(name.startswith(PREFIX) for name in names)
    return path


def logits(path: Path) -> torch.Tensor:
    """Logits of PROMPT, by the method that reads the checkpoint."""
    plugins, config = load_plugins(), Checkpoint.open(path).quantization
    if config is None:
        return ModelBench(Mistral3Text, path, [PROMPT]).prompt_logits(0)
    methods = [plugins.quant.get(name).load() for name in plugins.quant.names()]
    [method] = [one for one in methods if one.refuses(config, DeviceInfo(type="cpu")) is None]
    return ModelBench(Mistral3Text, path, [PROMPT], quant=method.from_checkpoint(config, None)).prompt_logits(0)


@pytest.mark.parametrize("method", ["fp8", "int8", "rtn", "gptq", "awq"])
def test_checkpoint_with_former_prefixes_is_served_once_quantized(method: str, mistral3: Path, tmp_path: Path) -> None:
    """The towers of images stay as they are."""
    form = {"format": method} if method in ("gptq", "awq") else {}
    more = {} if method in ("fp8", "int8") else {"group_size": 32, "symmetric": method != "awq"}
    settings = Settings.choose("rtn" if form else method, **form, **more, ignore=("re:.*layers.1.mlp",))
    out = tmp_path / "out"
    quantize(mistral3, out, settings, device="cpu")
    before, after = load_file(mistral3 / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name for name in before if FORMER_PREFIX not in name} <= set(after)
    assert all(torch.equal(after[name], before[name]) for name in before if "language_model" not in name)
    assert f"{FORMER_PREFIX}layers.1.mlp.gate_proj.weight" in after
    assert f"{FORMER_PREFIX}layers.0.mlp.gate_proj.weight" not in after or method in ("fp8", "int8")
    expected = logits(mistral3)
    assert 1e-4 < float((logits(out) - expected).norm() / expected.norm()) < 0.5


LISTS: dict[str, tuple[list[str], list[str]]] = {
    "names of tensors": (["Linear"], ["language_model.lm_head"]),
    "present names": (["Linear"], ["lm_head"]),
    "a pattern of both": (["Linear"], ["re:.*lm_head"]),
    "patterns of names of tensors": ([r"re:language_model\.model\.layers\."], []),
    "patterns of present names": ([r"re:model\.language_model\.layers\."], []),
}
"""Targets, and modules to ignore."""


@pytest.mark.parametrize("lists", LISTS)
def test_lists_of_modules_may_have_the_names_of_tensors_or_the_present_ones(
    lists: str, mistral3: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize(mistral3, out, Settings.choose("fp8"), device="cpu")
    expected = logits(out)
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["config_groups"]["group_0"]["targets"], quantization["ignore"] = LISTS[lists]
    (out / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(out), expected)


@pytest.mark.parametrize("prefix", [FORMER_PREFIX, PREFIX])
def test_overrides_may_have_the_names_of_tensors_or_the_present_ones(
    prefix: str, mistral3: Path, tmp_path: Path
) -> None:
    """GPTQ's patterns of modules that are left alone."""
    out = tmp_path / "out"
    settings = Settings.choose("rtn", format="gptq", group_size=32, ignore=("re:.*layers.1.mlp",))
    quantize(mistral3, out, settings, device="cpu")
    expected = logits(out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {f"-:^{re.escape(prefix)}layers.1.mlp": {}}
    (out / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(out), expected)


@pytest.mark.parametrize("prefix", [FORMER_PREFIX, PREFIX])
def test_layers_that_fp8_per_tensor_leaves_alone_may_have_the_names_of_tensors_or_the_present_ones(
    prefix: str, mistral3: Path, tmp_path: Path
) -> None:
    """Its scales have one of two names, so that both are optional."""
    tensors = load_file(mistral3 / "model.safetensors")
    for name in [one for one in tensors if re.search(r"language_model.*layers\.1\..*_proj\.weight$", one)]:
        scale = tensors[name].abs().max().float() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    alone = [
        name.removesuffix(".weight").replace(FORMER_PREFIX, prefix)
        for name in tensors
        if "layers.0." in name and name.endswith("_proj.weight")
    ]
    config = json.loads((mistral3 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": [*alone, "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits(mistral3)
    assert 1e-4 < float((logits(tmp_path) - expected).norm() / expected.norm()) < 0.5
