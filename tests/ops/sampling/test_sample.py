"""The fused draw against core/sampling/arithmetic.py: the same tokens, except where the rounding of a sum decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.core.sampling.arithmetic import MAX_SELECTED_TOP_K, cutoffs, draw, uniforms
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.types import SamplingParams

pytest.importorskip("triton")

from engine.ops.sampling.sample import CHUNK, SAMPLE, draw_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER = -math.inf


def sample_rows(logits: torch.Tensor, rows: torch.Tensor, table: SamplingTable) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_rows(logits, rows, **table.columns)


def make_table(
    params: list[SamplingParams], outputs: list[int] | None = None, rows: list[int] | None = None
) -> SamplingTable:
    rows = list(range(len(params))) if rows is None else rows
    table = SamplingTable(max(rows, default=0) + 1, DEVICE)
    table.write(rows, params, outputs or [0] * len(params))
    return table


def random_logits(
    rows: int, vocab: int, seed: int = 0, spread: float = 2.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(DEVICE, dtype)


def kept_scores(logits: torch.Tensor, params: SamplingParams, p_scale: float = 1.0) -> torch.Tensor:
    """The scores from which one row draws, by `arithmetic`: [1, vocab] float32."""
    scores = logits.float()[None]
    vocab = scores.shape[1]
    scores = (scores - scores.max()) / torch.tensor([[params.temperature]], device=logits.device)
    least = torch.tensor([[float(params.min_p)]], device=logits.device).log()
    if 0 < params.top_k < vocab or params.top_p < 1:
        k = min(params.top_k or vocab, vocab)
        p = params.top_p * p_scale if params.top_p < 1 else 2.0
        found = cutoffs(
            scores,
            torch.tensor([[k]], device=logits.device),
            torch.tensor([[p]], device=logits.device),
            k if k <= MAX_SELECTED_TOP_K else vocab,
        )
        least = torch.maximum(least, found)
    return scores.masked_fill(scores < least, NEVER)


def check(logits: torch.Tensor, params: list[SamplingParams], outputs: list[int] | None = None) -> int:
    """Assert that every row's token is that of `arithmetic`; returns how many were decided by rounding."""
    outputs = outputs or [0] * len(params)
    table = make_table(params, outputs)
    before = logits.clone()
    tokens, max_logits = sample_rows(logits, rows_of(params), table)
    assert torch.equal(logits, before)
    assert table.num_outputs[: len(params)].tolist() == outputs
    assert torch.equal(max_logits, logits.max(dim=-1).values.float())
    uniform = uniforms(table.keys, table.num_outputs)
    rounding = 3e-6 + 1e-9 * logits.shape[1]
    unsure = 0
    for row, each in enumerate(params):
        token = int(tokens[row])
        if each.greedy:
            assert token == int(logits[row].argmax())
            continue
        if token == int(draw(kept_scores(logits[row], each), uniform[row : row + 1])):
            continue
        unsure += 1
        candidates = (kept_scores(logits[row], each, scale) for scale in (1.0, 1 - rounding, 1 + rounding))
        near = any(within_rounding(scores, token, float(uniform[row]), 4 * rounding) for scores in candidates)
        assert near, f"row {row}, {each}: token {token}"
    return unsure


def rows_of(params: list[SamplingParams]) -> torch.Tensor:
    return torch.arange(len(params), device=DEVICE)


def within_rounding(scores: torch.Tensor, token: int, uniform: float, rounding: float) -> bool:
    """Whether `token` is drawn at a number within `rounding` of `uniform`."""
    cumulative = scores[0].double().softmax(-1).cumsum(-1)
    low = float(cumulative[token - 1]) if token else 0.0
    return float(scores[0, token]) > NEVER and low - rounding <= uniform <= float(cumulative[token]) + rounding


MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2e-5},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 4999},
    {"top_k": 2**31},
    {"top_p": 1e-6},
    {"top_p": 0.1},
    {"top_p": 0.95, "temperature": 3.0},
    {"top_p": 0.9999},
    {"top_p": 1 - 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 3000, "top_p": 0.9},
    {"top_k": 50, "min_p": 0.1},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {"temperature": 0.0},
]


def mixed(count: int, start: int = 0) -> list[SamplingParams]:
    return [SamplingParams(seed=start + number, **MIXES[number % len(MIXES)]) for number in range(count)]


ON_GPU = [1, 2, 997, 1024, 1025, CHUNK, 3 * CHUNK - 5, 50257, 128256, 151936, 262208]
VOCABS: list[Any] = [50, CHUNK + 1, *(pytest.param(vocab, marks=pytest.mark.gpu) for vocab in ON_GPU)]


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_the_reference(vocab: int) -> None:
    params = mixed(len(MIXES), start=vocab)
    logits = random_logits(len(params), vocab, seed=vocab)
    assert check(logits, params, [number * 7 for number in range(len(params))]) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tokens_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """Half precision has few values: there are ties at every cutoff."""
    params = [SamplingParams(seed=3, **asked) for asked in MIXES[6:8] + MIXES[10:13] + MIXES[16:18]]
    assert check(random_logits(len(params), 5000, spread=4.0, dtype=dtype), params) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.5, 2.0, 10.0])
def test_tokens_of_a_large_batch_are_those_of_the_reference(dtype: torch.dtype, spread: float) -> None:
    params = mixed(256, start=1000)
    assert check(random_logits(256, 151936, spread=spread, dtype=dtype), params) <= 6


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 2e-5, 0.5, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 3, 17, 100, 10**6]),
    top_p=st.sampled_from([1e-3, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=12, deadline=None)
@given(params=some_params, vocab=st.integers(1, 60), levels=st.integers(1, 40), data=st.data())
def test_any_parameters_over_few_values(params: SamplingParams, vocab: int, levels: int, data: st.DataObject) -> None:
    """Logits with many ties, and with tokens of logit -inf."""
    values = data.draw(st.lists(st.integers(-levels, levels), min_size=vocab, max_size=vocab))
    logits = torch.tensor([values], dtype=torch.float32, device=DEVICE) / 4
    logits[logits == -levels / 4] = NEVER
    if torch.isneginf(logits).all():
        logits[0, 0] = 0.0
    check(logits, [params])


def test_cutoffs_keep_ties_with_the_last_token_kept() -> None:
    """All logits are equal: every token is kept, whatever the cutoff, and the whole row is searched."""
    params = [SamplingParams(seed=seed, top_k=2 + seed % 2, top_p=[1.0, 0.5][seed % 2]) for seed in range(6)]
    check(torch.zeros(6, 3000, device=DEVICE), params)


@pytest.mark.parametrize("asked", [{"top_k": 40}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.5}], ids=str)
def test_wrong_bounds_from_the_sample_are_corrected(asked: dict[str, Any]) -> None:
    """The sampled positions, from which the bounds of the cutoff are estimated, differ from the rest of the row."""
    vocab = 4 * SAMPLE
    for low, high in ((-20.0, 0.0), (0.0, -3.0)):
        logits = random_logits(1, vocab, spread=0.5) + high
        logits[:, ::4] += low - high
        assert check(logits, [SamplingParams(seed=11, **asked)]) == 0


def test_draws_equal_the_reference_where_one_token_has_nearly_all_mass() -> None:
    """The cutoffs lie above all sampled logits, or in the far tail."""
    logits = random_logits(5, 5000, spread=1.0)
    logits[:, 4321] = 30.0
    asked = [{"top_p": 0.9}, {"top_k": 3}, {"top_p": 1 - 1e-7}, {"top_k": 3, "top_p": 0.5}, {"temperature": 4.0}]
    assert check(logits, [SamplingParams(seed=5, **each) for each in asked]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.nan])
def test_logits_that_are_not_finite_show_in_the_max_logit(value: float) -> None:
    params = [SamplingParams(seed=1, **asked) for asked in ({"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 5})]
    vocab = CHUNK + 50
    logits = random_logits(4, vocab)
    expected, _ = sample_rows(logits, rows_of(params), make_table(params))
    choices: list[Sequence[int]] = [[0], [vocab - 1], range(vocab)]
    for places in choices:
        logits[2:] = value if len(places) > 1 else logits[2:]
        logits[2:, list(places)] = value
        tokens, max_logits = sample_rows(logits, rows_of(params), make_table(params))
        assert max_logits.isfinite().tolist() == [True, True, False, False]
        assert torch.equal(max_logits.isnan(), logits.isnan().any(-1))
        assert torch.equal(tokens[:2], expected[:2])
        assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_row_without_any_possible_token() -> None:
    params = [SamplingParams(seed=1, **asked) for asked in ({"temperature": 0}, {}, {"top_p": 0.5})]
    tokens, max_logits = sample_rows(torch.full((3, 70), NEVER, device=DEVICE), rows_of(params), make_table(params))
    assert max_logits.tolist() == [NEVER] * 3
    assert ((tokens >= 0) & (tokens < 70)).all()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, CHUNK + 100, device=DEVICE)
    logits[0, :50] = -0.0
    logits[1, [CHUNK + 1, CHUNK + 7]] = 1.0
    logits[2, [30, 40, CHUNK + 3]] = 2.0
    params = [SamplingParams(temperature=0)] * 3
    assert sample_rows(logits, rows_of(params), make_table(params))[0].tolist() == [0, CHUNK + 1, 30]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor on its row in the batch and in the table; padding rows may be repeated."""
    params = mixed(len(MIXES), start=50)[::3]
    logits = random_logits(len(params), 3000)
    expected, _ = sample_rows(logits, rows_of(params), make_table(params))
    places = torch.randperm(len(params), generator=torch.Generator().manual_seed(0)).tolist()
    table = make_table(params, rows=[2 * place + 1 for place in places])
    order = [*reversed(range(len(params)))]
    rows = [2 * places[at] + 1 for at in order] + [table.padding_row] * 3
    batch = torch.cat([logits[order], logits[:3]])
    tokens, _ = sample_rows(batch, torch.tensor(rows, device=DEVICE), table)
    assert tokens[: len(order)].tolist() == expected[order].tolist()
    assert tokens[len(order) :].tolist() == logits[:3].argmax(-1).tolist()


def test_logits_may_be_part_of_a_wider_tensor() -> None:
    params = mixed(4, start=9)
    wide = random_logits(8, 700)
    part = wide[::2, :600]
    expected, _ = sample_rows(part.contiguous(), rows_of(params), make_table(params))
    assert sample_rows(part, rows_of(params), make_table(params))[0].tolist() == expected.tolist()


def test_draw_rows_takes_no_rows() -> None:
    tokens, max_logits = sample_rows(torch.zeros(0, 5, device=DEVICE), rows_of([]), make_table([]))
    assert tokens.shape == max_logits.shape == (0,)


@pytest.mark.parametrize("rows", [60, pytest.param(20000, marks=pytest.mark.gpu)])
def test_frequencies_fit_the_distribution(rows: int) -> None:
    """Chi-square test over the positions of one sequence."""
    probs = np.array([0.3, 0.05, 0.25, 0.0, 0.22, 0.18])
    logits = torch.tensor(probs, dtype=torch.float32).log().expand(rows, -1).to(DEVICE)
    table = make_table([SamplingParams(seed=77)] * rows, outputs=list(range(rows)))
    tokens, _ = sample_rows(logits, torch.arange(rows, device=DEVICE), table)
    drawn = np.bincount(tokens.cpu().numpy(), minlength=6)
    assert drawn[3] == 0
    expected = np.delete(probs, 3) * rows
    statistic = ((np.delete(drawn, 3) - expected) ** 2 / expected).sum()
    assert statistic < 4 + 4 * math.sqrt(8)


@pytest.mark.gpu
def test_a_replayed_graph_draws_the_same_tokens() -> None:
    params = mixed(64, start=5)
    table = make_table(params)
    logits = random_logits(64, 128256, dtype=torch.bfloat16)
    rows = rows_of(params)
    expected, _ = sample_rows(logits, rows, table)
    static = torch.zeros_like(logits)
    sample_rows(static, rows, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, max_logits = sample_rows(static, rows, table)
    static.copy_(logits)
    for _ in range(5):
        graph.replay()
        assert torch.equal(tokens, expected)
        assert torch.equal(max_logits, logits.max(-1).values.float())
