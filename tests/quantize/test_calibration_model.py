"""The decoder layers over calibration text, compared with the whole model in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core.device import find_device
from engine.core.weights import Checkpoint
from engine.quantize.calibration_model import CalibrationModel
from engine.quantize.settings import Settings
from engine.quantize.source import Source, make_blueprint
from engine.testing.checkpoints import make_checkpoint


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
def test_layers_compute_what_transformers_does(architecture: str, tmp_path: Path) -> None:
    """gemma2 caps attention scores, which SDPA does not; gemma3_text scales embeddings by a buffer."""
    path = make_checkpoint(tmp_path, architecture, tokenizer=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    tokens = torch.arange(60)[None] * 7 % 500
    library: Any = transformers
    whole = library.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = whole.model(tokens).last_hidden_state[0]

    source = Source(Checkpoint.open(path))
    model = CalibrationModel(source, torch.device("cpu"))
    hidden = model.embed(tokens)
    with torch.inference_mode():
        for layer in make_blueprint(source, Settings.choose("fp8"), find_device("cpu")).layers:
            model.load(layer, {name: source.read(f"{layer.prefix}.{name}") for name in layer.names})
            model.advance(layer, hidden)
        torch.testing.assert_close(whole.model.norm(hidden[0])[0], expected)
