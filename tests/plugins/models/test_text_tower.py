"""Checkpoints that also read images: the language model alone equals the whole model of transformers for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.core.plugin_host import load_plugins
from engine.core.weights import Checkpoint
from engine.plugins.models.text_tower import FORMER_PREFIX, PREFIX, Gemma3Text
from engine.testing.checkpoints import OWN_WAYS, TINY
from engine.testing.model_bench import ModelBench

PROMPT = [(37 * place) % 500 for place in range(40)]
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TINY, **OWN_WAYS["gemma3_text"], "tie_word_embeddings": True},
        "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "image_token_index": 510,
    },
    "mistral3": {
        "text_config": {**TINY, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "head_dim": 8, "image_size": 28, "patch_size": 14},
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**TINY, "rope_parameters": MROPE},
        "vision_config": {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": False,
    },
}
"""model_type -> config.json."""
PLUGINS = {"gemma3": "gemma3-multimodal", "mistral3": "mistral3", "qwen3_vl": "qwen3-vl"}


@pytest.mark.parametrize("kind", CASES)
def test_text_logits_equal_transformers_under_both_names_of_the_tensors(kind: str, tmp_path: Path) -> None:
    library: Any = transformers  # without types
    config = library.AutoConfig.for_model(kind, **CASES[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    cls = load_plugins().models.get(PLUGINS[kind]).load()
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


@pytest.mark.parametrize("kind", CASES)
def test_one_model_accepts_each_checkpoint(kind: str) -> None:
    library: Any = transformers
    config = json.loads(library.AutoConfig.for_model(kind, **CASES[kind]).to_json_string())
    models = load_plugins().models
    accepting = [name for name in models.names() if models.get(name).load().refuses(config) is None]
    assert accepting == [PLUGINS[kind]]


def test_checkpoint_without_a_text_config_is_refused() -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    assert "lacks text_config" in (Gemma3Text.refuses(config) or "")
