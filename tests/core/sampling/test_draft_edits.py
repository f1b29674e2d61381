"""Logits processors that depend on the outputs so far count the drafts before each row of a slice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.sampling import full
from engine.core.sampling.draft_rows import DraftRows
from engine.core.sampling.sampler import Sampler
from engine.core.types import DraftSlice, SamplingParams, Step

from .reference import EOS, EVERYTHING, VOCAB, make_sampler, random_logits, sample

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 2.0, "logprobs": 1},
    {"seed": 1, "repetition_penalty": 2.0},
    {"seed": 2, **EVERYTHING, "min_tokens": 9, "logit_bias": ((EOS, 9.0), (11, 9.0))},
    {"temperature": 0.0, "repetition_penalty": 0.6, "frequency_penalty": -1.0},
    {"temperature": 0.0, "min_tokens": 7, "logit_bias": ((EOS, 30.0),)},
    {"seed": 3, "top_p": 0.9},
]
LENGTH = 24
PROMPT = (1, 2, 3)
LOGITS = random_logits(len(PARAMS) * LENGTH, spread=1.5).view(len(PARAMS), LENGTH, VOCAB)
"""By sequence and number of outputs."""


def one_by_one(sampler: Sampler, length: int = LENGTH) -> list[list[int]]:
    """The first tokens of each sequence."""
    columns = [sample(sampler, LOGITS[:, at], range(len(PARAMS))).to_host()[0] for at in range(length)]
    return [list(row) for row in zip(*columns, strict=True)]


def with_drafts(sampler: Sampler, wanted: Sequence[Sequence[int]], pick: random.Random) -> list[list[int]]:
    """The tokens of each sequence, with drafts of which some are wrong; now and then a sequence has none."""
    length = len(wanted[0])
    found: list[list[int]] = [[] for _ in PARAMS]
    last_tokens = torch.zeros(len(PARAMS) + 1, dtype=torch.int64)
    drafted_before: set[int] = set()
    while True:
        running = [number for number in range(len(PARAMS)) if len(found[number]) < length]
        if not running:
            return found
        plain, slices = [], []
        for number in running:
            at = len(found[number])
            drafts = list(wanted[number][at : at + pick.randint(0, 4)])[: length - at - 1]
            if drafts and pick.random() < 0.5:
                drafts[pick.randrange(len(drafts))] = pick.randrange(VOCAB)
            if not at or not drafts:
                plain.append(number)
            else:
                slices.append(DraftSlice(number, len(PROMPT) + at - 1, (found[number][-1], *drafts)))
        positions = tuple((number, len(PROMPT) + len(found[number]) - 1) for number in drafted_before & set(plain))
        step = Step(id=1, decodes=tuple(plain), chunks=(), drafts=tuple(slices), positions=positions)
        sampler.update(step, lambda sequence: sequence)
        drafted_before = (drafted_before - set(plain)) | {part.sequence for part in slices}
        if not slices:
            tokens, _ = sample(sampler, torch.stack([LOGITS[one, len(found[one])] for one in plain]), plain).to_host()
        else:
            sequences = [*plain, *(part.sequence for part in slices for _ in part.tokens)]
            rows = DraftRows.of(slices, np.array([part.sequence for part in slices]), len(plain), torch.device("cpu"))
            places = [len(found[number]) for number in plain]
            places += [len(found[part.sequence]) + at for part in slices for at in range(len(part.tokens))]
            sampled = sampler.sample(LOGITS[sequences, places], sequences, torch.tensor(sequences), rows)
            verified = sampler.verify(rows, sampled.tokens, last_tokens)
            tokens, entries = sampled.to_host()
            for part, accepted in zip(slices, verified.to_host(tokens, entries)[0], strict=True):
                found[part.sequence] += accepted
        for number, token in zip(plain, tokens, strict=False):
            found[number].append(token)


@pytest.mark.parametrize("max_rows", [full.MAX_ROWS, 3])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_sampled_one_by_one(seed: int, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "MAX_ROWS", max_rows)
    chosen = [SamplingParams(**each) for each in PARAMS]
    wanted = one_by_one(make_sampler(*chosen, prompt=PROMPT))
    assert not {EOS, 11, 13} & set(wanted[3][:9])
    assert EOS in wanted[3][9:]
    assert wanted[5][6:8] != [EOS, EOS]
    assert wanted[5][7] == EOS
    sampler = make_sampler(*chosen, prompt=PROMPT)
    assert with_drafts(sampler, wanted, random.Random(seed)) == wanted
    assert not sampler._until_min_tokens


@pytest.mark.interpreter
def test_tokens_of_the_kernels_are_those_sampled_one_by_one() -> None:
    chosen = [SamplingParams(**each) for each in PARAMS]
    wanted = one_by_one(make_sampler(*chosen, prompt=PROMPT, fused=True), 6)
    assert with_drafts(make_sampler(*chosen, prompt=PROMPT, fused=True), wanted, random.Random(1)) == wanted


def test_min_tokens_cost_the_full_path_no_longer_than_they_ban() -> None:
    sampler = make_sampler(SamplingParams(temperature=0.0, min_tokens=4), prompt=PROMPT)
    logits = random_logits(1)[0]
    [first] = sample(sampler, logits[None], [0]).to_host()[0]
    part = DraftSlice(0, 3, (first, first, first))
    rows = DraftRows.of([part], np.array([0]), 0, torch.device("cpu"))
    sampled = sampler.sample(logits.expand(3, -1), [0] * 3, torch.zeros(3, dtype=torch.int64), rows)
    sampler.verify(rows, sampled.tokens, torch.zeros(2, dtype=torch.int64))
    assert sampler.sampling_path([0]) is sampler.full_path
    sampler.update(Step(id=1, decodes=(0,), chunks=(), positions=((0, 6),)), lambda sequence: sequence)
    assert sampler.sampling_path([0]) is sampler.greedy_path
