"""Every native family against transformers: logits and greedy tokens on one rank and several, unquantized and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.core.distributed import RankGroup
from engine.core.plugin_host import load_plugins
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks
from tests.plugins.quant.packers import FILE
from tests.reference_tokens import greedy_reference

from .families import FAMILIES, RANKS
from .write_family import quantize, rename, vision_modules, write_plain

PROMPT = [(37 * place) % 500 for place in range(40)]
"""Longer than the sliding windows."""
STEPS = 8
LIMIT = 1e-5
"""Of the relative error (norms) of logits."""
CLEAR = 200 * LIMIT
"""Least margin of greedy tokens and of chosen experts, in standard deviations."""
ROUTERS = ("gate.weight", "router.weight", "shared_expert_gate.weight")


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
    """Quantized, too: the unquantized checkpoint has the dequantized weights of the quantized one."""
    family = FAMILIES[name]
    cls = load_plugins().models.get(family.plugin or name).load()
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_plain(plain, name)
    quant = quantize(plain, quantized, name)
    auto_class = "AutoModelForImageTextToText" if family.reads_images else "AutoModelForCausalLM"
    expected = greedy_reference(plain, PROMPT, STEPS, auto_class)
    rename(plain, name)
    rename(quantized, name)
    assert expected.margin > CLEAR, "choose another seed: rounding may decide the greedy tokens"
    if expected.routing_margin is not None:
        assert expected.routing_margin > CLEAR, "choose another seed: rounding may decide which experts compute"
    for ranks in RANKS:
        for path, method in ((plain, None), (quantized, quant)):

            def work(group: RankGroup) -> tuple[torch.Tensor, list[int]]:
                bench = ModelBench(cls, path, [[*PROMPT, *expected.tokens]], quant=method, group=group)  # noqa: B023
                return logits_and_choices(bench)

            for logits, choices in run_ranks(ranks, work):
                error = float((logits - expected.logits).norm() / expected.logits.norm())
                assert error < LIMIT, f"{path.name} on {ranks} ranks"
                assert choices == expected.tokens, f"{path.name} on {ranks} ranks"


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_form_quantizes_all_projections_or_all_experts(name: str, tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", name)
    vision = vision_modules(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", name)
    unquantized = {
        tensor
        for tensor, values in load_file(tmp_path / "quantized" / FILE).items()
        if ".layers." in tensor and values.is_floating_point() and values.dim() > 1
        if tensor.removesuffix(".weight") not in vision and not tensor.endswith((*ROUTERS, ".scales", "_bias"))
    }
    if FAMILIES[name].form == "mxfp4":
        unquantized = {tensor for tensor in unquantized if ".self_attn." not in tensor}
    assert unquantized == set()


def test_every_native_family_is_compared() -> None:
    """On all of RANKS and in a quantized form, which no family can leave out."""
    native = {one.name for one in load_plugins().models if not one.fallback}
    assert {family.plugin or name for name, family in FAMILIES.items()} == native
    assert RANKS == (1, 2, 4)
