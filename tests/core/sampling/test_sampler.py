"""Tokens of the sampler against the reference, whatever the path."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.sampling.token_counts import TokenCounts
from engine.core.types import NO_TOKEN, NewSequence, SamplingParams
from tests.core.sampling.reference import (
    ALONE,
    EOS,
    EVERYTHING,
    VOCAB,
    make_sampler,
    random_logits,
    reference_probs,
    reference_token,
    reference_uniform,
    run,
    sample,
)


@pytest.mark.parametrize("asked", ALONE, ids=str)
def test_tokens_equal_the_reference_sampler(asked: dict[str, Any]) -> None:
    """The reference inverts the same distribution at the same uniform number."""
    seeds = range(8)
    logits = random_logits(len(seeds))
    prompt, unsure = [1, 2, 3], 0
    outputs: list[list[int]] = [[] for _ in seeds]
    sampler = make_sampler(*(SamplingParams(seed=seed, **asked) for seed in seeds))
    for _ in range(20):
        tokens, _ = sample(sampler, logits, tuple(seeds)).to_host()
        for seed, output in enumerate(outputs):
            probs = reference_probs(logits[seed].numpy(), SamplingParams(seed=seed, **asked), prompt, output)
            expected, close = reference_token(probs, reference_uniform(seed, len(output)))
            unsure += close
            assert tokens[seed] == expected or close
            output.append(tokens[seed])
    assert unsure < 4


@pytest.mark.parametrize("asked", [{}, {"top_p": 0.8}, {"top_k": 10}, {"min_p": 0.05}, {"temperature": 0.5}], ids=str)
def test_frequencies_fit_the_distribution(asked: dict[str, Any]) -> None:
    """Chi-square test: 64 sequences x 128 output positions, all from one distribution."""
    logits = random_logits(1, spread=1.5)
    params = [SamplingParams(seed=1000 + row, **asked) for row in range(64)]
    tokens = run(make_sampler(*params), logits.expand(64, -1), range(64), 128)
    drawn = np.bincount(np.array(tokens).ravel(), minlength=VOCAB)
    probs = reference_probs(logits[0].numpy(), params[0], [1, 2, 3], [])
    assert not drawn[probs == 0].any()
    expected = probs * drawn.sum()
    rare = expected < 10
    cells = np.append(expected[~rare], expected[rare].sum() + 1e-9)
    found = np.append(drawn[~rare], drawn[rare].sum())
    statistic = ((found - cells) ** 2 / cells).sum()
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt = random_logits(1, seed=5), (1, 2, 3, 3)
    expected = RepetitionPenaltyLogitsProcessor(5.0)(torch.tensor([prompt]), logits).argmax().item()
    best = int(logits.argmax())
    for penalty, prompt_, wanted in ((5.0, prompt, expected), (5.0, (best,), None)):
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        token = sample(make_sampler(params, prompt=prompt_), logits, (0,)).to_host()[0][0]
        assert token != best if wanted is None else token == wanted


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [5, 9]] = 1.0
    logits[2, [30, 40, 41]] = 2.0
    greedy = SamplingParams(temperature=0)
    assert sample(make_sampler(greedy, greedy, greedy), logits, (0, 1, 2)).to_host()[0] == [0, 5, 30]
    others = SamplingParams(top_k=1, seed=1), SamplingParams(temperature=1e-9, seed=1), greedy
    assert sample(make_sampler(*others), logits, (0, 1, 2)).to_host()[0] == [0, 5, 30]


def test_top_k_keeps_ties_with_the_last_token_kept() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    tokens = run(make_sampler(SamplingParams(top_k=2, seed=1)), logits, (0,), 400)[0]
    assert len(set(tokens)) > 30


def test_sample_leaves_logits_unchanged() -> None:
    logits = random_logits(2)
    before = logits.clone()
    run(make_sampler(SamplingParams(seed=0, **EVERYTHING), SamplingParams(temperature=0)), logits, (0, 1), 3)
    assert torch.equal(logits, before)


def test_sample_takes_bfloat16_logits() -> None:
    logits = random_logits(2).bfloat16()
    params = SamplingParams(seed=3, top_p=0.9, logprobs=2), SamplingParams(temperature=0)
    tokens = sample(make_sampler(*params), logits, (0, 1)).to_host()[0]
    assert tokens == sample(make_sampler(*params), logits.float(), (0, 1)).to_host()[0]


def test_extreme_temperatures_draw_many_tokens_or_one() -> None:
    logits = random_logits(2, spread=30)
    hot, cold = SamplingParams(temperature=100, seed=1), SamplingParams(temperature=2e-5, seed=1)
    rows = run(make_sampler(hot, cold), logits, (0, 1), 200)
    assert len(set(rows[0])) > 30
    assert set(rows[1]) == {int(logits[1].argmax())}


def test_extreme_logit_biases_decide_every_token() -> None:
    params = (
        SamplingParams(seed=1, logit_bias=((42, 1e30),)),
        SamplingParams(seed=1, logit_bias=((3, -1e30), (4, 1e30))),
    )
    logits = torch.full((2, VOCAB), -5.0)
    logits[1, 3] = 100
    assert run(make_sampler(*params), logits, (0, 1), 10) == [[42] * 10, [4] * 10]


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token 50; the vocabulary ends at 49"):
        make_sampler(SamplingParams(temperature=0, logit_bias=((VOCAB, 1.0),)))


def test_min_tokens_bans_the_tokens_that_end_a_request() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 11], logits[:, 20] = 10, 8, 6
    base: dict[str, Any] = {"temperature": 0, "min_tokens": 3, "stop_token_ids": (11, VOCAB + 5)}
    params = SamplingParams(**base), SamplingParams(**base, ignore_eos=True), SamplingParams(temperature=0)
    rows = run(make_sampler(*params), logits, (0, 1, 2), 5)
    assert rows == [[20, 20, 20, EOS, EOS], [EOS] * 5, [EOS] * 5]
    again = make_sampler(params[0], output=(20, 20))
    assert run(again, logits[:1], (0,), 2) == [[20, EOS]]


def test_penalties_count_sampled_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 20] = 5.0, 4.0
    presence = SamplingParams(temperature=0, presence_penalty=2.0)
    assert run(make_sampler(presence), logits, (0,), 4) == [[10, 20, 10, 10]]
    frequency = SamplingParams(temperature=0, frequency_penalty=0.75)
    assert run(make_sampler(frequency), logits, (0,), 5) == [[10, 10, 20, 10, 20]]
    of_the_prompt = make_sampler(presence, prompt=(10, 10))
    assert run(of_the_prompt, logits, (0,), 1) == [[10]], "presence_penalty is about the output only"


def test_a_freed_slot_is_cleared_before_reuse() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)
    sampler = make_sampler(params)
    first = run(sampler, logits, (0,), 30)
    for number in range(1, 12):
        sampler.remove(number - 1)
        sampler.add(NewSequence(sequence=number, tokens=(1, 2, 3), prompt_len=3, params=params), table_row=0)
        columns = [sampler.sample(logits, (number,), torch.zeros(1, dtype=torch.int64)).to_host()[0] for _ in first[0]]
        assert [[token for column in columns for token in column]] == first


def test_the_penalties_table_grows_and_shrinks_with_its_sequences() -> None:
    """Tokens are those of a sequence alone, whatever joins and leaves."""
    count, steps = 37, 4
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)
    logits = random_logits(1)
    expected = run(make_sampler(params), logits, (0,), steps + 12)[0]
    sampler = make_sampler(*[params] * count)
    table = sampler._token_counts
    assert len(table.counts) == len(table.seen) == count
    found = run(sampler, logits.expand(count, -1), range(count), steps)
    assert found == [expected[:steps]] * count
    sizes, left = [], list(range(count))
    for number in (*range(0, count, 2), *range(1, count - 4, 2)):
        sampler.remove(number)
        left.remove(number)
        sizes.append(len(table.counts))
    assert (sizes, left) == (sorted(sizes, reverse=True), [33, 35])
    assert sizes[-1] < 10
    assert run(sampler, logits.expand(2, -1), left, 12) == [expected[steps:]] * 2
    later = NewSequence(sequence=99, tokens=(1, 2, 3), prompt_len=3, params=params)
    sampler.add(later, table_row=0)
    assert sampler.sample(logits, (99,), torch.zeros(1, dtype=torch.int64)).to_host()[0] == expected[:1]


@pytest.mark.parametrize("max_slots", [1, 4, 5, 37, 256])
def test_the_penalties_table_stays_within_its_maximum(max_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TokenCounts(VOCAB, max_slots, torch.device("cpu"))
    peak, resize = 0, table._resize

    def noted(capacity: int) -> None:
        nonlocal peak
        peak = max(peak, table.counts.nbytes + table.seen.nbytes + capacity * VOCAB * 5)
        resize(capacity)

    monkeypatch.setattr(table, "_resize", noted)
    new = NewSequence(sequence=0, tokens=(1,), prompt_len=1, params=SamplingParams())
    slots = [table.add(new) for _ in range(max_slots)]
    assert len(table.counts) == max_slots
    assert peak == TokenCounts.max_bytes(VOCAB, max_slots)
    assert sorted(slot.index for slot in slots) == list(range(max_slots))
    for slot in slots:
        table.free(slot)
    assert len(table.counts) <= 4
    assert peak == TokenCounts.max_bytes(VOCAB, max_slots)


def test_same_seed_gives_same_tokens() -> None:
    logits = random_logits(1).expand(4, -1)
    params = [SamplingParams(seed=seed) for seed in (5, 6, 5, 7)]
    rows = run(make_sampler(*params), logits, range(4), 50)
    assert rows[0] == rows[2]
    assert len({tuple(row) for row in rows}) == 3


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_tokens_do_not_depend_on_preemption(asked: dict[str, Any], cut: int) -> None:
    logits = random_logits(1)
    params = SamplingParams(seed=9, **asked)
    whole = run(make_sampler(params), logits, (0,), 12)[0]
    resumed = make_sampler(params, output=whole[:cut])
    assert run(resumed, logits, (0,), 12 - cut)[0] == whole[cut:]


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 10**6]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, 5.0),)]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(mine=some_params, others=st.lists(some_params, max_size=5), data=st.data())
def test_a_row_does_not_depend_on_the_others(
    mine: SamplingParams, others: list[SamplingParams], data: st.DataObject
) -> None:
    """Other sequences join, leave and change rows from step to step; tokens and log probabilities stay the same."""
    logits = random_logits(6, seed=1)
    alone = make_sampler(mine)
    together = make_sampler(mine, *others)
    for _ in range(6):
        numbers = st.sampled_from(range(1, len(others) + 1)) if others else st.nothing()
        guests: list[int] = data.draw(st.lists(numbers, unique=True))
        place = data.draw(st.integers(0, len(guests)))
        batch = [*guests[:place], 0, *guests[place:]]
        expected, expected_logprobs = sample(alone, logits[:1], (0,)).to_host()
        tokens, logprobs = sample(together, logits[batch], batch).to_host()
        assert tokens[place] == expected[0]
        found = logprobs[place] if logprobs else None
        wanted = expected_logprobs[0] if expected_logprobs else None
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-6)
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("asked", [{"temperature": 0}, {}, {"top_p": 0.5}, EVERYTHING], ids=["0", "1", "top_p", "all"])
def test_a_row_that_is_not_finite_has_no_token(value: float, asked: dict[str, Any], fused: bool) -> None:
    if fused:
        pytest.importorskip("triton")
    params = SamplingParams(seed=1, **asked)
    logits = random_logits(3)
    expected = sample(make_sampler(params, params, params, fused=fused), logits, (0, 1, 2)).to_host()[0]
    logits[1, 13] = value
    sampled = sample(make_sampler(params, params, params, fused=fused), logits, (0, 1, 2))
    assert all(0 <= token < VOCAB for token in sampled.tokens.tolist()), "the next step must be able to look it up"
    assert sampled.to_host()[0] == [expected[0], NO_TOKEN, expected[2]]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_processors_make_infinite_has_no_token(temperature: float, fused: bool) -> None:
    if fused:
        pytest.importorskip("triton")
    sick = SamplingParams(seed=1, temperature=temperature, repetition_penalty=0.01)
    banned = SamplingParams(seed=1, temperature=temperature, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    sound = SamplingParams(seed=1, temperature=temperature, repetition_penalty=1.1)
    sampler = make_sampler(sick, banned, sound, fused=fused)
    logits = torch.full((3, VOCAB), 5.0)
    logits[0] = 1e37  # a hundred times as much is beyond float32
    first, second, third = sample(sampler, logits, (0, 1, 2)).to_host()[0]
    assert (first, second) == (NO_TOKEN, NO_TOKEN)
    assert 0 <= third < VOCAB


def test_a_row_without_any_possible_token_has_no_token() -> None:
    sampled = sample(make_sampler(SamplingParams(seed=1)), torch.full((1, VOCAB), -math.inf), (0,))
    assert sampled.to_host()[0] == [NO_TOKEN]


def test_tokens_of_logit_minus_infinity_are_never_sampled() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 44]] = 0.0
    assert set(run(make_sampler(SamplingParams(seed=1)), logits, (0,), 100)[0]) == {4, 44}


def test_sequences_must_be_added_and_seeded() -> None:
    sampler = make_sampler(SamplingParams(temperature=0), SamplingParams(temperature=0))
    sample(sampler, random_logits(2), (0, 1))
    sampler.remove(1)
    with pytest.raises(ExecutorError, match="has no sequence 1: not added, or removed"):
        sample(sampler, random_logits(2), (0, 1))
    with pytest.raises(ExecutorError, match="no seed"):
        make_sampler(SamplingParams())


def test_an_empty_batch_yields_no_tokens() -> None:
    assert sample(make_sampler(), torch.zeros(0, VOCAB), ()).to_host() == ([], [])
