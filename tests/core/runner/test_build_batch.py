import numpy as np
import pytest
import torch

from engine.core.runner.build_batch import build_batch
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.types import DraftSlice, NewSequence, PrefillChunk, SamplingParams, Step


def new(sequence: int, tokens: tuple[int, ...], prompt_len: int | None = None) -> NewSequence:
    return NewSequence(
        sequence=sequence,
        tokens=tokens,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        params=SamplingParams(),
    )


def step(*chunks: PrefillChunk, decodes: tuple[int, ...] = (), iterations: int = 1, **changes: object) -> Step:
    return Step(id=0, decodes=decodes, chunks=chunks, iterations=iterations, **changes)


@pytest.fixture
def persistent_batch() -> PersistentBatch:
    return PersistentBatch(max_running=3, max_len=32, block_size=4, scratch_block=99, device=torch.device("cpu"))


def test_a_prompt_becomes_positions_and_slots(persistent_batch: PersistentBatch) -> None:
    first = step(PrefillChunk(7, 0, 6, True), new=(new(7, (10, 11, 12, 13, 14, 15)),), blocks=((7, (5, 2)),))
    persistent_batch.update(first)
    batch, sampling = build_batch(persistent_batch, first)
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.slots.tolist() == [20, 21, 22, 23, 8, 9]
    assert batch.query_starts.tolist() == [0, 6]
    assert batch.context_lens.tolist() == [6]
    assert batch.logit_rows.tolist() == [5]
    assert batch.block_tables.tolist() == [[5, 2]]
    assert np.array_equal(batch.block_tables_host, [[5, 2]])
    assert sampling.tolist() == [persistent_batch.row(7)]


def test_a_middle_chunk_has_no_logit_rows(persistent_batch: PersistentBatch) -> None:
    chunk = step(PrefillChunk(0, 2, 3, False), new=(new(0, tuple(range(8))),), blocks=((0, (0, 1)),))
    persistent_batch.update(chunk)
    batch, sampling = build_batch(persistent_batch, chunk)
    assert batch.tokens.tolist() == [2, 3, 4]
    assert batch.positions.tolist() == [2, 3, 4]
    assert batch.logit_rows.tolist() == []
    assert sampling.tolist() == []


def test_decodes_take_the_token_sampled_last(persistent_batch: PersistentBatch) -> None:
    first = step(
        PrefillChunk(0, 0, 2, True),
        PrefillChunk(1, 0, 3, True),
        new=(new(0, (1, 2)), new(1, (3, 4, 5))),
        blocks=((0, (0,)), (1, (1,))),
    )
    persistent_batch.update(first)
    _, rows = build_batch(persistent_batch, first)
    persistent_batch.set_last_tokens(rows, torch.tensor([100, 101]))
    mixed = step(PrefillChunk(2, 0, 2, True), decodes=(1, 0), new=(new(2, (6, 7)),), blocks=((2, (2,)),))
    persistent_batch.update(mixed)
    batch, rows = build_batch(persistent_batch, mixed)
    assert batch.tokens.tolist() == [101, 100, 6, 7]
    assert batch.positions.tolist() == [3, 2, 0, 1]
    assert batch.slots.tolist() == [7, 2, 8, 9]
    assert batch.num_decodes == 2
    assert batch.query_lens_host.tolist() == [1, 1, 2]
    assert batch.logit_rows.tolist() == [0, 1, 3]
    assert rows.tolist() == [persistent_batch.row(number) for number in (1, 0, 2)]


def test_iterations_advance_positions_and_tokens(persistent_batch: PersistentBatch) -> None:
    first = step(PrefillChunk(0, 0, 3, True), new=(new(0, (1, 2, 3)),), blocks=((0, (0, 1)),))
    persistent_batch.update(first)
    _, rows = build_batch(persistent_batch, first)
    persistent_batch.set_last_tokens(rows, torch.tensor([50]))
    twice = step(decodes=(0,), iterations=2)
    persistent_batch.update(twice)
    assert build_batch(persistent_batch, twice)[0].slots.tolist() == [3]
    persistent_batch.set_last_tokens(rows, torch.tensor([51]))
    batch, _ = build_batch(persistent_batch, twice)
    assert (batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist()) == ([51], [4], [4])
    assert batch.context_lens.tolist() == [5]


def test_a_chunk_after_a_cached_prefix_starts_behind_it(persistent_batch: PersistentBatch) -> None:
    late = step(PrefillChunk(0, 4, 2, True), new=(new(0, tuple(range(6))),), blocks=((0, (8, 3)),))
    persistent_batch.update(late)
    batch, _ = build_batch(persistent_batch, late)
    assert (batch.positions.tolist(), batch.slots.tolist()) == ([4, 5], [12, 13])
    assert persistent_batch.computed[persistent_batch.row(0)] == 6


def test_a_draft_slice_samples_after_each_of_its_tokens(persistent_batch: PersistentBatch) -> None:
    first = step(
        PrefillChunk(0, 0, 2, True),
        PrefillChunk(1, 0, 3, True),
        new=(new(0, (1, 2)), new(1, (3, 4, 5))),
        blocks=((0, (0,)), (1, (1, 2))),
    )
    persistent_batch.update(first)
    build_batch(persistent_batch, first)
    later = step(
        PrefillChunk(2, 0, 2, False),
        decodes=(0,),
        new=(new(2, (6, 7, 8)),),
        blocks=((2, (3,)),),
        drafts=(DraftSlice(1, 3, (20, 21, 22)),),
    )
    persistent_batch.update(later)
    persistent_batch.last_tokens[persistent_batch.row(0)] = 9
    batch, rows = build_batch(persistent_batch, later)
    assert batch.tokens.tolist() == [9, 6, 7, 20, 21, 22]
    assert batch.positions.tolist() == [2, 0, 1, 3, 4, 5]
    assert batch.slots.tolist() == [2, 12, 13, 7, 8, 9]
    assert batch.query_starts.tolist() == [0, 1, 3, 6]
    assert batch.context_lens.tolist() == [3, 2, 6]
    assert batch.logit_rows.tolist() == [0, 3, 4, 5]
    assert batch.num_decodes == 1
    assert rows.tolist() == [persistent_batch.row(sequence) for sequence in (0, 1, 1, 1)]


def test_a_sequence_decodes_at_the_position_that_the_step_says(persistent_batch: PersistentBatch) -> None:
    first = step(PrefillChunk(0, 0, 2, True), new=(new(0, (1, 2)),), blocks=((0, (5, 6)),))
    drafts = step(drafts=(DraftSlice(0, 2, (7, 8, 9)),))
    later = step(decodes=(0,), positions=((0, 4),))
    for each in (first, drafts, later):
        persistent_batch.update(each)
        batch, _ = build_batch(persistent_batch, each)
    assert batch.positions.tolist() == [4]
    assert batch.slots.tolist() == [24]
