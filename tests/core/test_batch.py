import numpy as np
import pytest
import torch

from engine.core.batch import BatchBuilder
from engine.core.types import NewSequence, SamplingParams, Slice, Step


def new(sequence: int, tokens: tuple[int, ...], prompt_len: int | None = None) -> NewSequence:
    return NewSequence(
        sequence=sequence,
        tokens=tokens,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        params=SamplingParams(),
    )


def step(*chunks: Slice, decodes: tuple[int, ...] = (), iterations: int = 1, **changes: object) -> Step:
    return Step(id=0, decodes=decodes, chunks=chunks, iterations=iterations, **changes)


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(max_running=3, max_len=32, page_size=4, device="cpu")


def test_a_prompt_becomes_positions_and_slots(builder: BatchBuilder) -> None:
    first = step(Slice(7, 0, 6, True), new=(new(7, (10, 11, 12, 13, 14, 15)),), blocks=((7, (5, 2)),))
    builder.update(first)
    batch = builder.build(first)
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.slots.tolist() == [20, 21, 22, 23, 8, 9]
    assert batch.query_starts.tolist() == [0, 6]
    assert batch.context_lens.tolist() == [6]
    assert batch.logit_rows.tolist() == [5]
    assert batch.block_tables.tolist() == [[5, 2]]


def test_a_middle_chunk_wants_no_logits(builder: BatchBuilder) -> None:
    chunk = step(Slice(0, 2, 3, False), new=(new(0, tuple(range(8))),), blocks=((0, (0, 1)),))
    builder.update(chunk)
    batch = builder.build(chunk)
    assert batch.tokens.tolist() == [2, 3, 4]
    assert batch.positions.tolist() == [2, 3, 4]
    assert batch.logit_rows.tolist() == []


def test_decodes_take_the_token_sampled_last(builder: BatchBuilder) -> None:
    first = step(
        Slice(0, 0, 2, True),
        Slice(1, 0, 3, True),
        new=(new(0, (1, 2)), new(1, (3, 4, 5))),
        blocks=((0, (0,)), (1, (1,))),
    )
    builder.update(first)
    builder.build(first)
    builder.keep([0, 1], torch.tensor([100, 101]))
    mixed = step(
        Slice(2, 0, 2, True),
        decodes=(1, 0),
        new=(new(2, (6, 7)),),
        blocks=((2, (2,)),),
    )
    builder.update(mixed)
    batch = builder.build(mixed)
    assert batch.tokens.tolist() == [101, 100, 6, 7]
    assert batch.positions.tolist() == [3, 2, 0, 1]
    assert batch.slots.tolist() == [7, 2, 8, 9]
    assert batch.query_lens_host.tolist() == [1, 1, 2]
    assert batch.logit_rows.tolist() == [0, 1, 3]


def test_iterations_move_positions_and_tokens_on(builder: BatchBuilder) -> None:
    first = step(Slice(0, 0, 3, True), new=(new(0, (1, 2, 3)),), blocks=((0, (0, 1)),))
    builder.update(first)
    builder.build(first)
    builder.keep([0], torch.tensor([50]))
    twice = step(decodes=(0,), iterations=2)
    builder.update(twice)
    assert builder.build(twice).slots.tolist() == [3]
    builder.keep([0], torch.tensor([51]))
    batch = builder.build(twice)
    assert (batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist()) == ([51], [4], [4])
    assert batch.context_lens.tolist() == [5]


def test_a_row_is_used_again_and_its_old_blocks_forgotten(builder: BatchBuilder) -> None:
    for sequence in range(10):
        one = step(
            Slice(sequence, 0, 1, True),
            new=(new(sequence, (sequence,)),),
            blocks=((sequence, (sequence,)),),
            finished=(sequence - 1,) if sequence else (),
        )
        builder.update(one)
        batch = builder.build(one)
        assert batch.slots.tolist() == [sequence * 4]
        assert np.array_equal(batch.block_tables_host, [[sequence]])


@pytest.mark.parametrize(("start", "count", "targets"), [(0, 2, [1, 2]), (2, 2, [3]), (3, 1, []), (0, 6, [1, 2, 3])])
def test_prompt_targets_end_with_the_prompt(builder: BatchBuilder, start: int, count: int, targets: list[int]) -> None:
    resumed = new(0, tuple(range(6)), prompt_len=4)
    builder.update(step(new=(resumed,)))
    assert builder.prompt_targets(resumed, start, count).tolist() == targets
