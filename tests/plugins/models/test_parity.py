"""Every native family against transformers: logits and greedy tokens on one rank and several, unquantized and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.distributed import RankGroup
from engine.core.plugin_host import load_plugins
from engine.core.quant import QuantMethod
from engine.plugins.models import CAUSAL, SPARSE
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.mxfp4 import Mxfp4
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks
from tests.plugins.quant.packers import Weight, quantize_checkpoint, quantize_experts_to_mxfp4
from tests.reference_tokens import logits_and_greedy_tokens

from .families import FAMILIES, Form

PROMPT = [(37 * place) % 500 for place in range(40)]
"""Longer than the sliding windows."""
STEPS = 8
GPTQ = {"quant_method": "gptq", "bits": 8, "sym": True, "desc_act": False, "group_size": -1}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}


def quantize(plain: Path, target: Path, form: Form) -> QuantMethod[Any]:
    """Write random quantized weights to `target`, and what they mean to `plain`. Returns what reads `target`."""
    if form == "mxfp4":
        quantize_experts_to_mxfp4(plain, target, MXFP4)
        return Mxfp4.from_checkpoint(MXFP4, None)

    def make(name: str, shape: tuple[int, int]) -> Any:
        weight = Weight(*shape, bits=8, group_size=-1, seed=sum(name.encode()))
        return weight.gptq(), weight.plain

    quantize_checkpoint(plain, target, GPTQ, make)
    return Gptq.from_checkpoint(GPTQ, None)


def logits_and_choices(bench: ModelBench) -> tuple[torch.Tensor, list[int]]:
    """The logits of all tokens, the last one decoded alone, and the greedy choice behind PROMPT and each later token.

    Where the choices are the tokens that follow, these are the model's greedy ones.
    """
    end = len(bench.prompts[0]) - 1
    hidden = torch.cat([bench.hidden([(0, 0, end)]), bench.hidden([(0, end, 1)])])
    with torch.inference_mode():
        return bench.model.logits(hidden), bench.model.greedy(hidden[len(PROMPT) - 1 : end])[1].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Quantized, too: the weights of the unquantized checkpoint are what those of the quantized one mean."""
    family = FAMILIES[name]
    cls = load_plugins().models.get(family.plugin or name).load()
    plain = make_checkpoint(tmp_path / "plain", name, **family.config)
    quant = quantize(plain, tmp_path / "quantized", family.form)
    expected, tokens = logits_and_greedy_tokens(plain, PROMPT, STEPS)
    for ranks in family.ranks:
        for path, method in ((plain, None), (tmp_path / "quantized", quant)):

            def work(group: RankGroup) -> tuple[torch.Tensor, list[int]]:
                bench = ModelBench(cls, path, [[*PROMPT, *tokens]], quant=method, group=group)  # noqa: B023
                return logits_and_choices(bench)

            for logits, choices in run_ranks(ranks, work):
                error = float((logits - expected).norm() / expected.norm())
                assert error < 1e-5, f"{path.name} on {ranks} ranks"
                assert choices == tokens, f"{path.name} on {ranks} ranks"


def test_every_native_family_is_compared() -> None:
    native = {cls.lower() for cls in CAUSAL} | {name for name, _ in SPARSE}
    assert {family.plugin or name for name, family in FAMILIES.items()} == native
