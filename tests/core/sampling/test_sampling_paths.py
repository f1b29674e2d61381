"""Which path serves a batch, and that all paths agree and do no needless work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from engine.core.errors import ExecutorError
from engine.core.models.base import Model
from engine.core.sampling.arithmetic import mix
from engine.core.sampling.base import CapturedTokens
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampler import Sampler
from engine.core.types import NewSequence, SamplingParams, Step
from tests.core.sampling.reference import (
    EOS,
    EVERYTHING,
    VOCAB,
    make_sampler,
    random_logits,
    run,
    sample,
)


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
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
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


def test_a_join_costs_the_host_nothing_per_biased_or_banned_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is put together from what `add` has sent to the device, sequence by sequence."""
    vocab = 2000
    asked = SamplingParams(
        temperature=0,
        logit_bias=tuple((token, 0.5) for token in range(1000)),
        min_tokens=9,
        stop_token_ids=tuple(range(1000, 2000)),
    )
    sampler = make_sampler(asked, asked, asked, vocab=vocab)
    sent: list[int] = []
    for name in ("_ints", "_floats"):
        send = getattr(sampler._builder, name)
        monkeypatch.setattr(sampler._builder, name, lambda values, send=send: sent.append(len(values)) or send(values))
    sample(sampler, random_logits(3, vocab), (0, 1, 2))
    assert 0 < sum(sent) < 30


def test_biases_of_one_token_add_up() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20] = 5.0
    bias = ((10, 3.0), (20, 0.25), (10, 3.0), (5, 1e30), (5, -1e30), (10, -0.5))
    sampler = make_sampler(SamplingParams(temperature=0, logit_bias=bias))
    assert run(sampler, logits, (0,), 2) == [[10, 10]]


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


@pytest.mark.interpreter
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


@pytest.mark.interpreter
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
            sampled = SampledTokens.from_tokens(tokens[:3], max_logits[:3])
            assert sampled.ready()
            columns.append(sampled.to_host()[0])
    assert [list(row) for row in zip(*columns, strict=True)] == expected


class IdentityModel:
    """A model whose hidden states are its logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        max_logits, tokens = hidden.max(dim=-1)
        return max_logits, tokens


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.interpreter)])
def test_capture_ends_with_tokens_or_logits(fused: bool) -> None:
    """A path that PyTorch's operations draw on is captured as the full path, which ends with logits."""
    if fused:
        pytest.importorskip("triton")
    params = SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0, logprobs=0)
    logits, model = random_logits(3), cast(Model, IdentityModel())
    sampler = make_sampler(*params, fused=fused)
    captured = [sampler.graph_path((row,)).capture(model, logits[[row]], torch.tensor([row])) for row in range(3)]
    greedy, drawn, full = captured
    assert isinstance(greedy, CapturedTokens)
    assert (greedy.tokens.tolist(), greedy.table_advanced) == ([int(logits[0].argmax())], False)
    assert isinstance(full, torch.Tensor)
    if fused:
        assert isinstance(drawn, CapturedTokens)
        assert drawn.table_advanced
        expected = sample(make_sampler(*params), logits[[1]], (1,)).to_host()[0]
        assert drawn.tokens.tolist() == expected
    else:
        assert torch.equal(torch.as_tensor(drawn), logits[[1]])
    assert sampler.table.num_outputs[:3].tolist() == [0, int(fused), 0]


def test_update_removes_finished_sequences_and_adds_new_ones() -> None:
    sampler = make_sampler(SamplingParams(seed=1))
    new = NewSequence(sequence=7, tokens=(1, 2, 3), prompt_len=2, params=SamplingParams(temperature=0))
    sampler.update(Step(id=0, decodes=(), chunks=(), new=(new,), finished=(0,)), lambda sequence: sequence - 7)
    assert sampler.sampling_path((7,)).name == "greedy"
    sampler.flush()
    assert sampler.table.num_outputs[0] == 1
    with pytest.raises(ExecutorError, match="has no sequence 0"):
        sample(sampler, random_logits(1), (0,))


GREEDY_NEXT_TO: list[tuple[str, list[dict[str, Any]]]] = [
    ("greedy", []),
    ("greedy", [{"temperature": 0.0}]),
    ("draw", [{"temperature": 1.0, "top_p": 0.9}]),
    ("draw", [{"temperature": 1.0}, {"top_k": 1}]),
    ("full", [{"temperature": 0.0, "logprobs": 2}]),
    ("full", [{"temperature": 0.0, "presence_penalty": 1.0}, {"temperature": 1.0}]),
]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("own", [{}, {"logprobs": 3}, {"top_k": 1}, {"logit_bias": ((0, -1.0),)}], ids=str)
def test_a_greedy_token_is_the_first_of_the_largest_logits_on_every_path(own: dict[str, Any], fused: bool) -> None:
    """bfloat16 logits with many ties; the neighbours choose the path."""
    if fused:
        pytest.importorskip("triton")
    vocab = 300
    asked = {"temperature": 0.0, "seed": 1, **own} if "top_k" not in own else {"seed": 1, **own}
    for seed in range(3):
        logits = (random_logits(3, vocab, seed) * 0.004 + 5).bfloat16()
        ties = (logits[0] == logits[0].max()).nonzero()
        assert len(ties) > 1
        for path, neighbours in GREEDY_NEXT_TO:
            params = [SamplingParams(**asked), *(SamplingParams(seed=2, **each) for each in neighbours)]
            sampler = make_sampler(*params, vocab=vocab, fused=fused)
            batch = range(len(params))
            if own in ({}, {"top_k": 1}):
                assert sampler.sampling_path(batch).name == path
            assert sample(sampler, logits[: len(params)], batch).to_host()[0][0] == int(ties[0])
