"""The fused verification of drafts against core/sampling/verify.py, and the distribution of what it generates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.sampling.arithmetic import draw, uniforms
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.sampling.verify import accept_matching
from engine.core.types import SamplingParams
from tests.core.sampling.reference import reference_probs
from tests.core.sampling.speculation_reference import chi_square

pytest.importorskip("triton")

from engine.ops.sampling.sample import draw_rows
from engine.ops.sampling.verify import match_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_one_token_is_distributed_as_without_drafts() -> None:
    """Chi-square over 3000 sequences of one processed distribution."""
    n, vocab, params = 3000, 6, {"temperature": 0.9, "top_k": 5}
    table = SamplingTable(n, DEVICE)
    rows = list(range(n))
    table.write(rows, [SamplingParams(**params, seed=one) for one in rows], [0] * n)
    pick = np.random.default_rng(1)
    logits = torch.from_numpy(pick.normal(size=vocab) * 1.5).float()
    target = reference_probs(logits.numpy(), SamplingParams(**params, seed=0), [], [])
    q = pick.dirichlet(np.ones(vocab))
    drafts = torch.from_numpy(pick.choice(vocab, n, p=q))[:, None]
    owners = torch.arange(n).repeat_interleave(2).to(DEVICE)
    offsets = torch.tensor([0, 1]).repeat(n).to(DEVICE)
    columns = table.columns
    sampled, _ = draw_rows(logits.expand(2 * n, -1).contiguous().to(DEVICE), owners, offsets=offsets, **columns)
    counts, tokens = match_rows(
        drafts.to(DEVICE),
        sampled,
        (torch.arange(n) * 2).to(DEVICE),
        torch.arange(n).to(DEVICE),
        last_tokens=torch.zeros(n + 1, dtype=torch.int64, device=DEVICE),
        num_outputs=columns["num_outputs"],
    )
    output = torch.where(counts.cpu() > 0, drafts[:, 0], tokens.cpu()).numpy()
    statistic, limit = chi_square(output, target)
    assert statistic < limit


def test_offsets_move_the_number_that_a_row_draws_by() -> None:
    params = [SamplingParams(temperature=1.0, seed=one) for one in (3, 4)]
    table = SamplingTable(2, DEVICE)
    table.write([0, 1], params, [5, 0])
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(8)).repeat_interleave(2, 0).to(DEVICE)
    rows, offsets = torch.tensor([0, 0, 1, 1], device=DEVICE), torch.tensor([0, 1, 2, 0], device=DEVICE)
    tokens, _ = draw_rows(logits, rows, **table.columns, offsets=offsets)
    positions = torch.tensor([5, 6, 2, 0], device=DEVICE)
    assert tokens.tolist() == draw(logits, uniforms(table.keys[rows], positions)).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_matching_drafts_are_counted_and_advance_their_sequences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slices, k = 20, 4
    drafts = torch.randint(-1, 3, (slices, k), generator=generator)
    drafts[(drafts < 0).long().cumsum(1) > 0] = -1  # none after the last
    num_drafts = (drafts >= 0).sum(1)
    first = torch.cumsum(num_drafts + 1, 0) - num_drafts - 1
    sampled = torch.randint(0, 3, (int(num_drafts.sum()) + slices,), generator=generator)
    padded = torch.nn.functional.pad(sampled, (0, k))
    expected = accept_matching(drafts, torch.stack([padded[at : at + k] for at in first.tolist()]))
    rows = torch.randperm(slices + 2, generator=generator)[:slices]
    last, outputs = torch.full((slices + 2,), -7), torch.arange(slices + 2)
    last, outputs = last.to(DEVICE), outputs.to(DEVICE)
    before = outputs.clone()
    counts, tokens = match_rows(
        *(one.to(DEVICE) for one in (drafts, sampled, first, rows)), last_tokens=last, num_outputs=outputs
    )
    assert counts.tolist() == expected.tolist()
    assert tokens.tolist() == sampled[first + expected].tolist()
    advanced = torch.zeros_like(before)
    advanced[rows.to(DEVICE)] = counts + 1
    assert torch.equal(outputs, before + advanced)
    others = torch.full_like(last, -7)
    others[rows.to(DEVICE)] = tokens
    assert torch.equal(last, others), "only these sequences have new last tokens"


def test_nothing_to_verify_is_no_launch() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    counts, tokens = match_rows(none.view(0, 2), none, none, none, last_tokens=none, num_outputs=none)
    assert counts.shape == tokens.shape == (0,)
