"""Quantized checkpoints of model families that bend the plain decoder, against transformers' dequantized models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core.distributed import RankGroup
from engine.core.plugin_host import load_plugins
from engine.plugins.quant.gptq import Gptq
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks

from .packers import Weight, quantize_checkpoint

FAMILIES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "olmo3": "olmo3",
    "starcoder2": "starcoder2",
    "cohere2": "cohere2",
}
"""Name of the plugin -> model_type."""
GPTQ = {"quant_method": "gptq", "bits": 8, "sym": True, "desc_act": False, "group_size": -1}
PROMPT = [(37 * place) % 500 for place in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_checkpoint_equals_its_dequantized_twin_on_one_rank_and_two(family: str, tmp_path: Path) -> None:
    """A word of the zero points holds several outputs: fused projections are read part by part all the same."""
    plain = make_checkpoint(tmp_path / "plain", FAMILIES[family])

    def make(name: str, shape: tuple[int, int]) -> Any:
        weight = Weight(*shape, bits=8, group_size=-1, seed=len(name))
        return weight.gptq(), weight.plain

    quantize_checkpoint(plain, tmp_path / "quantized", GPTQ, make)
    library: Any = transformers  # without types
    model = library.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]

    def work(group: RankGroup | None = None) -> torch.Tensor:
        cls, quant = load_plugins().models.get(family).load(), Gptq.from_checkpoint(GPTQ, None)
        return ModelBench(cls, tmp_path / "quantized", [PROMPT], quant=quant, group=group).prompt_logits(0)

    for found in [work(), *run_ranks(2, work)]:
        assert float((found - expected).norm() / expected.norm()) < 1e-5
