"""Rows that verify drafts: they sample what decoding one token after the other would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.sampling.draft_rows import DraftRows
from engine.core.sampling.sampler import Sampler
from engine.core.types import NO_TOKEN, DraftSlice, SamplingParams, TokenLogprobs

from .reference import make_sampler, random_logits, sample

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3},
    {"seed": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"seed": 5, "logit_bias": ((4, 3.0), (9, -100.0)), "logprobs": 2},
]
POSITIONS = 4
LOGITS = random_logits(len(PARAMS) * POSITIONS).view(len(PARAMS), POSITIONS, -1)
"""By sequence and position."""


def plain(sampler: Sampler) -> tuple[list[list[int]], list[list[TokenLogprobs | None]]]:
    """Tokens and logprobs of each sequence, by position."""
    steps = [sample(sampler, LOGITS[:, position], range(len(PARAMS))).to_host() for position in range(POSITIONS)]
    tokens, entries = zip(*steps, strict=True)
    return [list(column) for column in zip(*tokens, strict=True)], [list(each) for each in zip(*entries, strict=True)]


def verify(
    sampler: Sampler, drafts: Sequence[Sequence[int]], logits: torch.Tensor, alone: Sequence[int] = ()
) -> tuple[list[int], Any, torch.Tensor]:
    """Verify drafts of the sequences that are not `alone`, after these, which sample one token each.

    Returns the tokens of those alone, VerifiedDrafts.to_host, and the last tokens by sequence."""
    numbers = [number for number in range(len(PARAMS)) if number not in alone]
    slices = [DraftSlice(number, 9, (1, *each)) for number, each in zip(numbers, drafts, strict=True)]
    sequences = [*alone, *(part.sequence for part in slices for _ in part.tokens)]
    rows = DraftRows.of(slices, np.array(numbers), len(alone), torch.device("cpu"))
    taken = [logits[number, 0] for number in alone]
    taken += [logits[part.sequence, at] for part in slices for at in range(len(part.tokens))]
    sampled = sampler.sample(torch.stack(taken), sequences, torch.tensor(sequences), rows)
    last_tokens = torch.full((len(PARAMS) + 1,), -1)
    verified = sampler.verify(rows, sampled.tokens, last_tokens)
    tokens, entries = sampled.to_host()
    return tokens[: len(alone)], verified.to_host(tokens, entries), last_tokens


@pytest.mark.parametrize("right", range(POSITIONS))
@pytest.mark.parametrize("count", [len(PARAMS), 2, 1], ids=["full", "draw", "greedy"])
def test_accepted_drafts_and_the_next_token_are_those_sampled_one_by_one(count: int, right: int) -> None:
    chosen = [SamplingParams(**each) for each in PARAMS]
    wanted, entries = plain(make_sampler(*chosen))
    sampler = make_sampler(*chosen[:count], *[SamplingParams(temperature=0.0)] * (len(PARAMS) - count))
    drafts = [
        wanted[number][:right] + [49 - token for token in wanted[number][right : POSITIONS - 1]]
        for number in range(len(PARAMS))
    ]
    _, (verified, logprobs), last_tokens = verify(sampler, drafts, LOGITS)
    for number in range(count):
        assert list(verified[number]) == wanted[number][: right + 1]
        assert last_tokens[number] == wanted[number][right]
        assert sampler.table.num_outputs[number] == right + 1
    assert bool(logprobs) == (count == len(PARAMS))
    if logprobs:
        found = [entry.logprob for entry in logprobs[3]]
        assert found == pytest.approx([entry.logprob for entry in entries[3][: right + 1] if entry is not None])
        assert [len(each) for each in logprobs] == [0, 0, 0, right + 1]


def test_rows_without_drafts_sample_as_always() -> None:
    chosen = [SamplingParams(**each) for each in PARAMS]
    wanted, _ = plain(make_sampler(*chosen))
    sampler = make_sampler(*chosen)
    drafts = [wanted[1][:1], wanted[3][:3]]
    tokens, (verified, _), last_tokens = verify(sampler, drafts, LOGITS, alone=(2, 0))
    assert tokens == [wanted[2][0], wanted[0][0]]
    assert [list(each) for each in verified] == [wanted[1][:2], wanted[3]]
    assert sampler.table.num_outputs.tolist()[:4] == [1, 2, 1, 4]
    assert last_tokens.tolist() == [-1, wanted[1][1], -1, wanted[3][3], -1]


def test_tokens_end_at_logits_that_are_not_finite() -> None:
    chosen = [SamplingParams(temperature=0.0)] * len(PARAMS)
    wanted = LOGITS.argmax(dim=-1).tolist()
    logits = LOGITS.clone()
    logits[:, 1] = torch.nan
    drafts = [[wanted[number][0], token, token] for number, token in enumerate(range(len(PARAMS)))]
    drafts[0][1:] = [0, 0]  # what argmax makes of NaN, or not
    _, (verified, _), _ = verify(make_sampler(*chosen), drafts, logits)
    assert [list(each) for each in verified] == [[wanted[number][0], NO_TOKEN] for number in range(len(PARAMS))]
