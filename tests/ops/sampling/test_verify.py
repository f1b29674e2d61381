"""The fused verification of drafts against core/sampling/verify.py, and against a reference written from the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.sampling.arithmetic import draw, uniforms
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.sampling.verify import accept_matching, greedy_scores, verify_drafts
from engine.core.types import SamplingParams
from tests.core.sampling.reference import reference_probs
from tests.core.sampling.speculation_reference import chi_square

pytest.importorskip("triton")

from engine.ops.sampling.sample import CHUNK, draw_rows
from engine.ops.sampling.verify import match_rows, verify_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


class Case:
    """Slices with drafts that are drawn from random probabilities close to the target's."""

    def __init__(self, slices: int, k: int, vocab: int, seed: int, settings: tuple[dict[str, Any], ...] = SETTINGS):
        pick = np.random.default_rng(seed)
        self.params = [SamplingParams(**settings[one % len(settings)], seed=seed + one) for one in range(slices)]
        self.outputs = [int(one) for one in pick.integers(0, 9, slices)]
        self.table = SamplingTable(slices + 2, DEVICE)
        self.rows = [int(one) for one in pick.permutation(slices + 2)[:slices]]
        self.table.write(self.rows, self.params, self.outputs)
        lengths = [int(one) for one in pick.integers(0, k + 1, slices)]
        self.first = np.cumsum([0, *(length + 1 for length in lengths[:-1])])
        self.count = sum(lengths) + slices
        self.logits = torch.from_numpy(pick.normal(size=(self.count, vocab)) * 2).float()
        self.drafts = torch.full((slices, k), -1)
        self.q = torch.full((slices, k, vocab), 1 / vocab)
        self.p = torch.zeros(self.count, vocab)
        for one in range(slices):
            for place in range(lengths[one] + 1):
                at = int(self.first[one]) + place
                probs = reference_probs(self.logits[at].numpy(), self.params[one], [], [])
                self.p[at] = torch.from_numpy(probs)
                if place < lengths[one]:
                    q = 0.7 * probs + 0.3 * pick.dirichlet(np.ones(vocab))
                    self.q[one, place] = torch.from_numpy(q)
                    self.drafts[one, place] = int(pick.choice(vocab, p=q / q.sum()))
        self.owners = [row for row, length in zip(self.rows, lengths, strict=True) for _ in range(length + 1)]

    def tensors(self) -> dict[str, torch.Tensor]:
        rows = torch.tensor(self.rows)
        found = {"first": torch.from_numpy(self.first), "drafts": self.drafts, "rows": rows}
        return {name: tensor.to(DEVICE) for name, tensor in found.items()}

    def expected(self) -> tuple[list[int], list[int]]:
        """By `verify_drafts`, from the probabilities of the reference."""
        scores = self.p.log()
        greedy = [at for at, row in enumerate(self.owners) if self.params[self.rows.index(row)].greedy]
        scores[greedy] = greedy_scores(self.logits[greedy])
        keys = self.table.keys.cpu()[self.rows]
        counts, tokens = verify_drafts(
            scores, torch.from_numpy(self.first), self.drafts, self.q, keys, torch.tensor(self.outputs)
        )
        return counts.tolist(), tokens.tolist()

    def verify(self, dtype: torch.dtype = torch.float32) -> tuple[list[int], list[int], torch.Tensor]:
        self.last = torch.full((len(self.rows) + 3,), -7, device=DEVICE)
        counts, tokens, max_logits = verify_rows(
            self.logits.to(DEVICE, dtype),
            torch.tensor(self.owners).to(DEVICE),
            draft_probs=self.q.to(DEVICE),
            last_tokens=self.last,
            **self.tensors(),
            **self.table.columns,
        )
        return counts.tolist(), tokens.tolist(), max_logits


@pytest.mark.parametrize(("slices", "k", "vocab"), [(14, 3, 40), (3, 1, CHUNK + 100)])
def test_drafts_are_accepted_and_replaced_as_by_torch(slices: int, k: int, vocab: int) -> None:
    case = Case(slices, k, vocab, seed=slices)
    counts, tokens, max_logits = case.verify()
    assert (counts, tokens) == case.expected()
    assert torch.equal(max_logits.cpu(), case.logits.amax(dim=1))


def test_results_are_stored_and_other_sequences_left_alone() -> None:
    case = Case(5, 2, 30, seed=2)
    before = case.table.num_outputs.clone()
    counts, tokens, _ = case.verify()
    for row in range(len(before)):
        if row in case.rows:
            one = case.rows.index(row)
            assert case.table.num_outputs[row] == before[row] + counts[one] + 1
            assert case.last[row] == tokens[one]
        else:
            assert case.table.num_outputs[row] == before[row]
            assert case.last[row] == -7


def test_slices_without_drafts_draw_what_draw_rows_draws() -> None:
    case = Case(7, 1, 50, seed=4)
    case.drafts[:] = -1
    logits, owners = case.logits.to(DEVICE), torch.tensor(case.owners).to(DEVICE)
    expected, _ = draw_rows(logits, owners, **case.table.columns)
    counts, tokens, _ = case.verify()
    assert counts == [0] * 7
    assert tokens == expected.cpu()[case.first].tolist()


def test_a_draft_of_probability_0_is_replaced_by_a_token_that_may_come() -> None:
    case = Case(3, 1, 30, seed=5, settings=({"temperature": 1.0, "top_k": 2},))
    case.first, case.count = np.arange(3) * 2, 6
    case.logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(6))
    case.owners = [row for row in case.rows for _ in range(2)]
    case.drafts = case.logits[::2].argmin(dim=1)[:, None]
    case.q = torch.zeros(3, 1, 30).scatter_(2, case.drafts[:, :, None], 1.0)
    counts, tokens, _ = case.verify()
    assert counts == [0] * 3
    best = case.logits[::2].topk(2, dim=1).indices.tolist()
    assert all(token in two for token, two in zip(tokens, best, strict=True))


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
    owners = torch.arange(n).repeat_interleave(2)
    counts, tokens, _ = verify_rows(
        logits.expand(2 * n, -1).contiguous().to(DEVICE),
        owners.to(DEVICE),
        (torch.arange(n) * 2).to(DEVICE),
        drafts.to(DEVICE),
        torch.from_numpy(q).float().expand(n, 1, -1).contiguous().to(DEVICE),
        torch.arange(n).to(DEVICE),
        last_tokens=torch.zeros(n + 1, dtype=torch.int64, device=DEVICE),
        **table.columns,
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
    assert last[rows.to(DEVICE)].tolist() == tokens.tolist()


def test_nothing_to_verify_is_no_launch() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    counts, tokens = match_rows(none.view(0, 2), none, none, none, last_tokens=none, num_outputs=none)
    assert counts.shape == tokens.shape == (0,)
