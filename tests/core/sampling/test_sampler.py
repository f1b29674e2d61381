import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.sampling.arithmetic import MAX_SELECTED_TOP_K, cutoffs, draw, mix, uniforms
from engine.core.sampling.prompt_logprobs import prompt_logprobs, prompt_targets
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampler import Sampler
from engine.core.types import NewSequence, SamplingParams, TokenLogprobs

VOCAB = 50
EOS = 7
WORD = 2**64


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def reference_uniform(seed: int, position: int) -> float:
    return (reference_mix((reference_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) % WORD) >> 11) * 2.0**-53


def reference_probs(
    logits: npt.NDArray[Any], params: SamplingParams, prompt: list[int], output: list[int]
) -> npt.NDArray[Any]:
    """The distribution a token is drawn from, by loops over float64; logits: [vocab] numpy."""
    scores = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(output) < params.min_tokens:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        scores[sorted(ends)] = -np.inf
    for token in set(prompt) | set(output):
        scores[token] *= params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(scores))[int(scores.argmax())]
    scores /= params.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    probs = np.exp(scores[kept] - scores[kept].max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    size = max(1, int((before < params.top_p).sum())) if params.top_p < 1 else len(kept)
    kept, probs = kept[:size], probs[:size]
    full = np.zeros(len(scores))
    chosen = probs >= params.min_p * probs.max()
    full[kept[chosen]] = probs[chosen] / probs[chosen].sum()
    return full


def reference_token(probs: npt.NDArray[Any], uniform: float) -> tuple[int, bool]:
    """(token, whether rounding can change the token)."""
    cumulative = np.cumsum(probs)
    token = int((cumulative <= uniform * cumulative[-1]).sum())
    return token, float(np.abs(cumulative - uniform).min()) < 1e-5


def make_sampler(
    *params: SamplingParams,
    vocab: int = VOCAB,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    fused: bool = False,
) -> Sampler:
    sampler = Sampler(vocab, "cpu", frozenset({EOS}), max_running=max(len(params), 1), fused=fused)
    for number, each in enumerate(params):
        new = NewSequence(sequence=number, tokens=(*prompt, *output), prompt_len=len(prompt), params=each)
        sampler.add(new, table_row=number)
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, sequences: Sequence[int]) -> SampledTokens:
    """Sample; each sequence has the table row of its own number."""
    return sampler.sample(logits, sequences, torch.tensor(list(sequences), dtype=torch.int64))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def run(sampler: Sampler, logits: torch.Tensor, sequences: Sequence[int], steps: int) -> list[list[int]]:
    """Tokens sampled in `steps` steps from the same logits: one list per row."""
    columns = [sample(sampler, logits, sequences).to_host()[0] for _ in range(steps)]
    return [list(row) for row in zip(*columns, strict=True)]


EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": ((4, 2.0), (9, -50.0)),
    "min_tokens": 5,
    "stop_token_ids": (11, 13),
}
ALONE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 100},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": ((4, 3.0), (9, -100.0))},
    {"min_tokens": 10, "stop_token_ids": (11,)},
    {"min_tokens": 10, "ignore_eos": True},
    {"top_k": 10, "top_p": 0.7},
    EVERYTHING,
    {**EVERYTHING, "temperature": 0.0},
]


def test_uniforms_are_splitmix64() -> None:
    seeds = [0, 1, 2**31, 2**63 - 1]
    positions = [0, 1, 1000, 2**31]
    found = uniforms(mix(torch.tensor(seeds)), torch.tensor(positions))
    assert found.tolist() == [reference_uniform(seed, at) for seed, at in zip(seeds, positions, strict=True)]


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


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt = random_logits(1, seed=5), (1, 2, 3, 3)
    expected = RepetitionPenaltyLogitsProcessor(5.0)(torch.tensor([prompt]), logits).argmax().item()
    best = int(logits.argmax())
    for penalty, prompt_, wanted in ((5.0, prompt, expected), (5.0, (best,), None)):
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        token = sample(make_sampler(params, prompt=prompt_), logits, (0,)).to_host()[0][0]
        assert token != best if wanted is None else token == wanted


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


def test_extreme_temperatures() -> None:
    logits = random_logits(2, spread=30)
    hot, cold = SamplingParams(temperature=100, seed=1), SamplingParams(temperature=2e-5, seed=1)
    rows = run(make_sampler(hot, cold), logits, (0, 1), 200)
    assert len(set(rows[0])) > 30
    assert set(rows[1]) == {int(logits[1].argmax())}


def test_extreme_logit_biases() -> None:
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
        assert (logprobs[place] is None) == (expected_logprobs[0] is None)
        found, wanted = logprobs[place], expected_logprobs[0]
        if found is not None and wanted is not None:
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-6)
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]


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


def test_prompt_logprobs() -> None:
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("asked", [{"temperature": 0}, {}, {"top_p": 0.5}, EVERYTHING])
def test_to_host_names_the_sequence_whose_logits_are_not_finite(value: float, asked: dict[str, Any]) -> None:
    params = SamplingParams(seed=1, **asked)
    logits = random_logits(3)
    logits[1, 13] = value
    sampled = sample(make_sampler(params, params, params), logits, (0, 1, 2))
    assert all(0 <= token < VOCAB for token in sampled.tokens.tolist()), "the next step must be able to look it up"
    with pytest.raises(ExecutorError, match="logits of sequence 1 are not finite"):
        sampled.to_host()


def test_to_host_names_a_sequence_without_any_possible_token() -> None:
    sampled = sample(make_sampler(SamplingParams(seed=1)), torch.full((1, VOCAB), -math.inf), (0,))
    with pytest.raises(ExecutorError, match="sequence 0"):
        sampled.to_host()


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


@pytest.mark.parametrize("asked", [{"temperature": 0}, {}, {"top_p": 0.5}, EVERYTHING | {"logprobs": 3}], ids=str)
def test_sample_does_not_wait_for_the_device(asked: dict[str, Any]) -> None:
    """On the meta device, reading a value raises."""
    sampler = Sampler(VOCAB, "meta", frozenset({EOS}), max_running=2, fused=False)
    for number in (0, 1):
        params = SamplingParams(seed=number, **asked)
        sampler.add(NewSequence(sequence=number, tokens=(1, 2, 3), prompt_len=2, params=params), table_row=number)
    for batch in ((0, 1), (0, 1), (1,)):
        rows = torch.empty(len(batch), dtype=torch.int64, device="meta")
        sampled = sampler.sample(torch.empty(len(batch), VOCAB, device="meta"), batch, rows)
        assert sampled.tokens.shape == (len(batch),)
    with pytest.raises((NotImplementedError, RuntimeError)):
        sampled.to_host()


def test_a_sampling_batch_is_built_once_while_its_sequences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(*(SamplingParams(seed=seed, **EVERYTHING) for seed in range(3)))
    built: list[tuple[int, ...]] = []
    build = sampler._builder.build

    def noted(*arguments: Any) -> Any:
        built.append(arguments[0])
        return build(*arguments)

    monkeypatch.setattr(sampler._builder, "build", noted)
    batches: list[Sequence[int]] = [(0, 1, 2), [0, 1, 2], range(3), (0, 1), (0, 1)]
    for batch in batches:
        sample(sampler, random_logits(len(batch)), batch)
    assert built == [(0, 1, 2), (0, 1)]


def test_an_empty_batch_yields_no_tokens() -> None:
    assert sample(make_sampler(), torch.zeros(0, VOCAB), ()).to_host() == ([], [])


PATHS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "greedy"),
    ({"top_k": 1}, "greedy"),
    ({}, "draw"),
    ({"top_p": 0.5, "min_p": 0.1}, "draw"),
    ({"logprobs": 0, "temperature": 0}, "full"),
    ({"repetition_penalty": 1.1}, "full"),
    ({"presence_penalty": 0.1}, "full"),
    ({"frequency_penalty": 0.1, "temperature": 0}, "full"),
    ({"logit_bias": ((1, 1.0),)}, "full"),
    ({"min_tokens": 2}, "full"),
    ({"min_tokens": 2, "ignore_eos": True}, "draw"),
]


@pytest.mark.parametrize(("asked", "path"), PATHS, ids=str)
def test_sampling_path_serves_the_most_demanding_sequence(asked: dict[str, Any], path: str) -> None:
    greedy, drawing = SamplingParams(temperature=0), SamplingParams(seed=1)
    sampler = make_sampler(greedy, SamplingParams(seed=1, **asked), drawing)
    assert sampler.sampling_path((0,)).name == "greedy"
    assert sampler.sampling_path([0, 1]).name == path
    assert sampler.sampling_path((0, 2)).name == "draw"
    assert sampler.sampling_path((2, 1)).name == ("full" if path == "full" else "draw")
    sampler.remove(1)
    assert sampler.sampling_path((0, 2)).name == "draw"


def test_sampling_path_is_full_until_min_tokens() -> None:
    sampler = make_sampler(SamplingParams(temperature=0, min_tokens=3), SamplingParams(temperature=0), output=(9,))
    paths: list[str] = []
    batches: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (0, 1)]
    for batch in batches:
        paths.append(sampler.sampling_path((0, 1)).name)
        sample(sampler, random_logits(len(batch)), batch)
    assert paths == ["full", "full", "full", "greedy"]
    done = make_sampler(SamplingParams(temperature=0, min_tokens=2), output=(1, 2))
    assert done.sampling_path((0,)).name == "greedy"


def test_the_table_counts_outputs() -> None:
    sampler = make_sampler(SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=2), output=(4, 4))
    run(sampler, random_logits(2), (0, 2), 3)
    assert sampler.table.num_outputs[:3].tolist() == [5, 2, 5]
    sampler.table.advance(torch.tensor([1, 3, 3]))
    assert sampler.table.num_outputs[:3].tolist() == [5, 3, 5]


def test_a_sequence_removed_before_flush_leaves_its_row_to_the_next() -> None:
    sampler = make_sampler(SamplingParams(seed=1), SamplingParams(seed=2), output=(1,))
    sampler.remove(0)
    sampler.add(NewSequence(sequence=7, tokens=(1, 2, 3), prompt_len=1, params=SamplingParams(seed=3)), table_row=0)
    sampler.flush()
    assert sampler.table.num_outputs[:2].tolist() == [2, 1]
    assert sampler.table.keys[:2].tolist() == mix(torch.tensor([3, 2])).tolist()


@pytest.mark.parametrize("asked", [{}, {"temperature": 0}], ids=str)
def test_only_processed_rows_are_copied_as_float32(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(SamplingParams(seed=1, presence_penalty=1.0), *[SamplingParams(seed=2, **asked)] * 3)
    shapes: list[torch.Size] = []
    process = sampler.full_path._process

    def noted(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(logits.shape)
        return process(logits, *rest)

    monkeypatch.setattr(sampler.full_path, "_process", noted)
    sample(sampler, random_logits(4).bfloat16(), (1, 0, 2, 3))
    assert shapes == [(1, VOCAB)]


def test_a_fused_sampler_gives_the_same_tokens() -> None:
    """One batch, whose composition changes, has rows that draw, rows with all parameters and greedy rows."""
    pytest.importorskip("triton")
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, **EVERYTHING),
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(seed=3, top_p=0.8, logit_bias=((3, 4.0),)),
    ]
    plain, fused = make_sampler(*params), make_sampler(*params, fused=True)
    logits = random_logits(4)
    batches: list[tuple[int, ...]] = [(0, 1, 2, 3), (3, 1), (0, 2), (0,), (2,)]
    for batch in batches:
        for _ in range(2):
            expected, found = (sample(each, logits[list(batch)], batch).to_host() for each in (plain, fused))
            assert found == expected


def test_captured_draws_and_sample_alternate() -> None:
    """What is captured in a CUDA graph continues where `sample` stopped, and the reverse."""
    pytest.importorskip("triton")
    params = [SamplingParams(seed=1), SamplingParams(seed=2, top_k=5), SamplingParams(temperature=0)]
    logits = random_logits(3)
    expected = run(make_sampler(*params), logits, (0, 1, 2), 6)
    sampler = make_sampler(*params, fused=True)
    sampler.flush()
    padded, rows = logits[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 3])
    columns = []
    for step in range(6):
        if step % 3 == 0:
            columns.append(sample(sampler, logits, (0, 1, 2)).to_host()[0])
        else:
            tokens, max_logits = sampler.draw_path.draw_unprocessed(padded, rows)
            sampled = SampledTokens.from_tokens(tokens[:3], max_logits[:3], (0, 1, 2))
            assert sampled.ready()
            columns.append(sampled.to_host()[0])
    assert [list(row) for row in zip(*columns, strict=True)] == expected


def test_from_tokens_checks_max_logits() -> None:
    tokens, max_logits = torch.tensor([4, 5, 6]), torch.tensor([1.0, math.nan, -math.inf])
    sampled = SampledTokens.from_tokens(tokens, max_logits, (10, 11, 12))
    with pytest.raises(ExecutorError, match="sequence 11, 12 are not finite"):
        sampled.to_host()


@pytest.mark.parametrize(("start", "count", "targets"), [(0, 2, [1, 2]), (2, 2, [3]), (3, 1, []), (0, 6, [1, 2, 3])])
def test_prompt_targets_end_with_the_prompt(start: int, count: int, targets: list[int]) -> None:
    resumed = NewSequence(sequence=0, tokens=tuple(range(6)), prompt_len=4, params=SamplingParams())
    assert prompt_targets(resumed, start, count).tolist() == targets
