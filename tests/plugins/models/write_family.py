"""Writes a tiny random checkpoint of a native family, unquantized and quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from engine.core.quant import QuantMethod
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.mxfp4 import Mxfp4
from engine.testing.checkpoints import make_checkpoint
from tests.plugins.quant.packers import FILE, Weight, quantize_checkpoint, quantize_experts_to_mxfp4

from .families import FAMILIES

GPTQ = {"quant_method": "gptq", "bits": 8, "sym": True, "desc_act": False, "group_size": -1}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}


def write_plain(directory: Path, name: str) -> None:
    """Write the checkpoint that transformers reads."""
    family = FAMILIES[name]
    if family.reads_images:
        write_with_vision_tower(directory, name)
    else:
        make_checkpoint(directory, family.reference or name, seed=family.seed, **family.config)


def write_with_vision_tower(directory: Path, name: str) -> None:
    """Write a checkpoint of a language model and a vision tower."""
    library: Any = transformers  # without types
    config = library.AutoConfig.for_model(FAMILIES[name].reference or name, **FAMILIES[name].config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(FAMILIES[name].seed)
        model = library.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(directory)


def quantize(plain: Path, target: Path, name: str) -> QuantMethod[Any]:
    """Write random quantized weights to `target`, and their dequantized values to `plain`. Returns the method that
    reads `target`."""
    if FAMILIES[name].form == "mxfp4":
        quantize_experts_to_mxfp4(plain, target, MXFP4)
        return Mxfp4.from_checkpoint(MXFP4, None)

    def make(module: str, shape: tuple[int, int]) -> Any:
        weight = Weight(*shape, bits=8, group_size=-1, seed=sum(module.encode()))
        return weight.gptq(), weight.plain

    quantize_checkpoint(plain, target, GPTQ, make, vision_modules(plain))
    return Gptq.from_checkpoint(GPTQ, None)


def vision_modules(directory: Path) -> set[str]:
    """Modules of the vision tower, which published checkpoints leave unquantized."""
    names = [name.removesuffix(".weight") for name in load_file(directory / FILE)]
    return {name for name in names if "vision" in name or "visual" in name or "multi_modal_projector" in name}


def rename(directory: Path, name: str) -> None:
    """Make config.json that of the family, where transformers has the model under another name."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **FAMILIES[name].renamed}))
