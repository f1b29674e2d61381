"""Verification of drafts: no token at temperature 0 and no distribution above it changes, and wrong rules are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.sampling.arithmetic import draw, mix, uniforms
from engine.core.sampling.draw import kept_scores
from engine.core.sampling.sampling_batch import SamplingBatchBuilder, SequenceState
from engine.core.sampling.verify import accept_matching
from engine.core.types import SamplingParams
from tests.core.sampling.reference import reference_probs
from tests.core.sampling.speculation_reference import (
    FAULTS,
    Floats,
    Ints,
    TokenModel,
    Verify,
    chi_square,
    keys_of,
    to_torch,
    two_tokens,
    verify_by_the_paper,
)

VOCAB = 7
TARGET = TokenModel.random(VOCAB, 1)
OTHER = TokenModel.random(VOCAB, 2)
DRAFTERS = {
    "equal": TARGET,
    "close": TARGET.mixed(OTHER, 0.3),
    "far": OTHER,
    "certain": TokenModel(np.eye(VOCAB)[OTHER.probs.argmax(axis=1)] * 0.999 + 0.001 / VOCAB),
}
N = 20_000


def reference_rule(fault: str | None) -> Verify:
    pick = np.random.default_rng(3)
    return lambda p, q, drafts, seeds, before: verify_by_the_paper(p, q, drafts, pick, fault)


def matching_rule(p: Floats, q: Floats, drafts: Ints, seeds: Ints, before: int) -> tuple[Ints, Ints]:
    """`accept_matching` of tokens drawn from each row; the drafts' probabilities are not used."""
    slices, rows = len(p), p.shape[1]
    keys = mix(to_torch(seeds)).repeat_interleave(rows)
    positions = (torch.arange(rows) + before).repeat(slices)
    sampled = draw(to_torch(p).log().reshape(slices * rows, -1).float(), uniforms(keys, positions))
    sampled = sampled.view(slices, rows)
    counts = accept_matching(to_torch(drafts), sampled[:, :-1])
    return counts.numpy(), sampled.gather(1, counts[:, None]).squeeze(1).numpy()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_tokens_are_distributed_jointly_as_without_drafts(drafter: str, k: int) -> None:
    output = two_tokens(TARGET, DRAFTERS[drafter], 0, N, k, matching_rule, seed=5)
    statistic, limit = chi_square(output[:, 0] * VOCAB + output[:, 1], TARGET.joint(0))
    assert statistic < limit
    statistic, limit = chi_square(output[:, 0], TARGET.probs[0])
    assert statistic < limit


def test_the_reference_of_the_paper_passes_the_same_test() -> None:
    output = two_tokens(TARGET, DRAFTERS["close"], 0, N, 1, reference_rule(None), seed=5)
    statistic, limit = chi_square(output[:, 0] * VOCAB + output[:, 1], TARGET.joint(0))
    assert statistic < limit


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_fails_the_test_of_two_tokens(fault: str) -> None:
    output = two_tokens(TARGET, DRAFTERS["close"], 0, N, 1, reference_rule(fault), seed=5)
    statistic, limit = chi_square(output[:, 0] * VOCAB + output[:, 1], TARGET.joint(0))
    assert statistic > 2 * limit


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_is_accepted_with_its_probability_in_the_target(drafter: str) -> None:
    model = DRAFTERS[drafter]
    pick = np.random.default_rng(6)
    drafts = np.searchsorted(model.probs[0].cumsum(), pick.random(N)).clip(max=VOCAB - 1)[:, None]
    p = np.repeat(TARGET.probs[[0, 0]][None], N, 0)
    counts, _ = matching_rule(p, np.repeat(model.probs[[0]][None], N, 0), drafts, np.arange(N), 0)
    assert abs(counts.mean() - (TARGET.probs[0] * model.probs[0]).sum()) < 5 * np.sqrt(0.25 / N)


@pytest.mark.parametrize("seed", range(4))
def test_accept_matching_counts_the_first_drafts_that_are_the_sampled_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(-1, 3, (50, 4), generator=generator)
    sampled = torch.randint(0, 3, (50, 4), generator=generator)
    expected = []
    for mine, theirs in zip(drafts.tolist(), sampled.tolist(), strict=True):
        count = 0
        while count < 4 and mine[count] == theirs[count]:
            count += 1
        expected.append(count)
    assert accept_matching(drafts, sampled).tolist() == expected
    assert accept_matching(drafts[:, :0], sampled[:, :0]).tolist() == [0] * 50


def test_a_seeded_sequence_has_the_tokens_of_plain_decoding_whatever_matches() -> None:
    """`accept_matching` over whole outputs: wrong, right and mixed drafts."""
    model = TARGET.mixed(OTHER, 0.5)
    scores = torch.from_numpy(model.probs).log().float()

    def token(last: int, position: int) -> int:
        return int(draw(scores[last][None], uniforms(keys_of(1), torch.tensor([position]))))

    plain = [0]
    for position in range(40):
        plain.append(token(plain[-1], position))
    for seed in range(3):
        pick = np.random.default_rng(seed)
        output = [0]
        while len(output) < 41:
            ahead = plain[len(output) : len(output) + 3]
            drafts = [one if pick.random() < 0.7 else int(pick.integers(VOCAB)) for one in ahead]
            context = [output[-1], *drafts]
            sampled = [token(last, len(output) - 1 + place) for place, last in enumerate(context)]
            count = int(accept_matching(torch.tensor([drafts]), torch.tensor([sampled[:-1]])))
            output += sampled[: count + 1]
        assert output[:41] == plain


PARAMS = (
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
)


@pytest.mark.parametrize("settings", PARAMS, ids=str)
def test_the_target_is_the_processed_distribution(settings: dict[str, Any]) -> None:
    """Temperature, top_k, top_p and min_p apply before drafts are verified: the first token against numpy's loops."""
    params = SamplingParams(**settings, seed=0)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(3)) * 2
    target = reference_probs(logits.numpy(), params, [], [])
    assert 0 < (target > 0).sum() <= 10
    state = SequenceState(params=params, table_row=0, bias=None, banned_tokens=None, slot=None, min_length=0)
    batch = SamplingBatchBuilder(10, torch.device("cpu"), fused=False).build((0,), [state], ())
    assert batch.draw is not None
    scores = kept_scores(logits[None], batch.draw)
    q = np.random.default_rng(4).dirichlet(np.ones(10))
    drafts = torch.from_numpy(np.random.default_rng(5).choice(10, N, p=q))[:, None]
    sampled = draw(scores.expand(N, -1), uniforms(keys_of(N), torch.zeros(N, dtype=torch.int64)))
    counts = accept_matching(drafts, sampled[:, None])
    output = torch.where(counts > 0, drafts[:, 0], sampled).numpy()
    statistic, limit = chi_square(output, target)
    assert statistic < limit
