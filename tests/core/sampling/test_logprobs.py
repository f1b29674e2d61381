"""Log probabilities of sampled tokens and of prompts."""

from __future__ import annotations

import pytest
import torch

from engine.core.sampling.prompt_logprobs import prompt_logprobs, prompt_targets
from engine.core.types import NewSequence, SamplingParams, TokenLogprobs
from tests.core.sampling.reference import (
    EVERYTHING,
    VOCAB,
    make_sampler,
    random_logits,
    sample,
)


def test_logprobs_are_of_the_unprocessed_logits() -> None:
    logits = random_logits(3)
    params = (
        SamplingParams(seed=0, logprobs=4, **EVERYTHING),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
    )
    tokens, entries = sample(make_sampler(*params), logits, (0, 1, 2)).to_host()
    raw = logits.double().log_softmax(-1)
    assert entries[1] is None
    for row, top in ((0, 4), (2, 0)):
        entry = entries[row]
        assert entry is not None
        assert entry.token == tokens[row]
        assert entry.logprob == pytest.approx(raw[row, tokens[row]].item(), abs=1e-5)
        order = raw[row].argsort(descending=True).tolist()
        assert entry.rank == order.index(tokens[row]) + 1
        assert [token for token, _ in entry.top] == order[:top]
        assert [value for _, value in entry.top] == pytest.approx(raw[row, order[:top]].tolist(), abs=1e-5)
    assert entries[2] is not None
    assert entries[2].rank == 1


def test_more_logprobs_than_the_vocabulary_yields_all_tokens() -> None:
    params = SamplingParams(temperature=0, logprobs=1000)
    entry = sample(make_sampler(params), random_logits(1), (0,)).to_host()[1][0]
    assert entry is not None
    assert len(entry.top) == VOCAB


def test_prompt_logprobs_equal_float64() -> None:
    logits = random_logits(300)
    following = torch.arange(300) % VOCAB
    entries = prompt_logprobs(logits, following, 2)
    raw = logits.double().log_softmax(-1)
    assert len(entries) == 300
    for row, entry in enumerate(entries):
        assert isinstance(entry, TokenLogprobs)
        assert entry.token == row % VOCAB
        assert entry.logprob == pytest.approx(raw[row, entry.token].item(), abs=1e-5)
        assert entry.rank == 1 + int((raw[row] > raw[row, entry.token]).sum())
        assert [token for token, _ in entry.top] == raw[row].topk(2).indices.tolist()


@pytest.mark.parametrize(("start", "count", "targets"), [(0, 2, [1, 2]), (2, 2, [3]), (3, 1, []), (0, 6, [1, 2, 3])])
def test_prompt_targets_end_with_the_prompt(start: int, count: int, targets: list[int]) -> None:
    resumed = NewSequence(sequence=0, tokens=tuple(range(6)), prompt_len=4, params=SamplingParams())
    assert prompt_targets(resumed, start, count).tolist() == targets
