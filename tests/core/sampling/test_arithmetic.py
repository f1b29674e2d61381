"""The arithmetic of sampling against references and transformers."""

from __future__ import annotations

import math

import pytest
import torch

from engine.core.sampling.arithmetic import MAX_SELECTED_TOP_K, cutoffs, draw, mix, uniforms
from tests.core.sampling.reference import (
    VOCAB,
    random_logits,
    reference_uniform,
)


def test_uniforms_are_splitmix64() -> None:
    seeds = [0, 1, 2**31, 2**63 - 1]
    positions = [0, 1, 1000, 2**31]
    found = uniforms(mix(torch.tensor(seeds)), torch.tensor(positions))
    assert found.tolist() == [reference_uniform(seed, at) for seed, at in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0), (0, 0.7, 0), (30, 0.7, 0), (0, 1.0, 0.1), (40, 0.95, 0.05), (49, 0.2, 0)]
)
def test_cutoffs_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(16, seed=3)
    expected = TemperatureLogitsWarper(0.7)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    scores = logits / 0.7
    least = scores.amax(-1, keepdim=True) + torch.tensor(float(min_p)).log()
    if top_k or top_p < 1:
        k = torch.full((16, 1), top_k or VOCAB)
        p = torch.full((16, 1), top_p if top_p < 1 else 2.0)
        least = torch.maximum(least, cutoffs(scores, k, p, top_k or VOCAB))
    assert torch.equal(scores >= least, expected > -float("inf"))


def test_cutoffs_by_selection_and_by_sort_agree() -> None:
    vocab = MAX_SELECTED_TOP_K + 500
    scores = random_logits(8, vocab)
    k, p = torch.full((8, 1), 900), torch.full((8, 1), 0.9)
    assert torch.equal(cutoffs(scores, k, p, 900), cutoffs(scores, k, p, vocab))


def test_draw_never_yields_a_token_of_probability_0() -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.5, math.nextafter(0.5, 0), math.nextafter(1, 0)], dtype=torch.float64)
    assert draw(scores, uniform).tolist() == [1, 3, 1, 3]


def test_cutoffs_of_a_row_do_not_depend_on_the_batch() -> None:
    scores = random_logits(1).expand(3, -1)
    ordered = scores[0].sort(descending=True).values
    top_k, top_p = torch.tensor([[3], [20], [VOCAB]]), torch.full((3, 1), 2.0)
    assert cutoffs(scores, top_k, top_p, VOCAB)[:, 0].tolist() == ordered[[2, 19, VOCAB - 1]].tolist()
