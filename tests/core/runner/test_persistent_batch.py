import pytest
import torch

from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.transfer import to_device
from engine.core.types import NewSequence, SamplingParams, Step


def new(sequence: int, tokens: tuple[int, ...] = (1,), prompt_len: int | None = None) -> NewSequence:
    prompt = len(tokens) if prompt_len is None else prompt_len
    return NewSequence(sequence=sequence, tokens=tokens, prompt_len=prompt, params=SamplingParams())


def step(**changes: object) -> Step:
    return Step(id=0, decodes=(), chunks=(), **changes)


def send(persistent_batch: PersistentBatch) -> None:
    persistent_batch.apply(to_device(persistent_batch.take_changes(), persistent_batch.tables.device))


@pytest.fixture
def persistent_batch() -> PersistentBatch:
    return PersistentBatch(max_running=3, max_len=16, block_size=4, scratch_block=99, device=torch.device("cpu"))


def test_apply_updates_the_device_tables(persistent_batch: PersistentBatch) -> None:
    persistent_batch.update(step(new=(new(5), new(6)), blocks=((5, (7, 8)), (6, (1,)))))
    persistent_batch.update(step(blocks=((6, (2, 3)), (5, (9,)))))
    send(persistent_batch)
    assert persistent_batch.tables[persistent_batch.row(5)].tolist() == [7, 8, 9, 99]
    assert persistent_batch.tables[persistent_batch.row(6)].tolist() == [1, 2, 3, 99]
    assert persistent_batch.host_tables[persistent_batch.row(6), :3].tolist() == [1, 2, 3]


def test_take_changes_returns_each_change_once(persistent_batch: PersistentBatch) -> None:
    persistent_batch.update(step(new=(new(5),), blocks=((5, (7,)),)))
    assert persistent_batch.take_changes()
    assert persistent_batch.take_changes() == []
    persistent_batch.apply([])


def test_padding_row_points_to_the_scratch_block(persistent_batch: PersistentBatch) -> None:
    persistent_batch.update(step(new=tuple(new(i) for i in range(3)), blocks=tuple((i, (i,)) for i in range(3))))
    send(persistent_batch)
    assert persistent_batch.padding_row not in persistent_batch.rows((0, 1, 2)).tolist()
    assert persistent_batch.tables[persistent_batch.padding_row].tolist() == [99] * 4


def test_a_row_is_reset_when_reused(persistent_batch: PersistentBatch) -> None:
    for sequence in range(10):
        finished = (sequence - 1,) if sequence else ()
        persistent_batch.update(step(new=(new(sequence),), blocks=((sequence, (sequence,)),), finished=finished))
        send(persistent_batch)
        row = persistent_batch.row(sequence)
        assert persistent_batch.tables[row, 0] == sequence
        assert persistent_batch.computed[row] == 0
        persistent_batch.computed[row] = 7


def test_draft_rows_have_the_blocks_of_their_sequence_and_tokens_of_their_own() -> None:
    batch = PersistentBatch(
        max_running=2, max_len=16, block_size=4, scratch_block=99, device=torch.device("cpu"), draft_rows=3
    )
    batch.update(step(new=(new(5), new(6)), blocks=((5, (7, 8)), (6, (1,)))))
    send(batch)
    assert (batch.padding_row, list(batch.draft_rows)) == (2, [3, 4, 5])
    sources = torch.from_numpy(batch.rows((6, 5, 5)))
    batch.copy_rows(torch.tensor([3, 4, 5]), sources, torch.tensor([20, 21, 22]))
    assert batch.tables[3:, :2].tolist() == [[1, 99], [7, 8], [7, 8]]
    assert batch.last_tokens.tolist() == [0, 0, 0, 20, 21, 22]


def test_blocks_take_the_places_of_those_that_rejected_drafts_gave_back(persistent_batch: PersistentBatch) -> None:
    persistent_batch.update(step(new=(new(5),), blocks=((5, (7, 8, 9)),)))
    persistent_batch.update(step(blocks=((5, (-1,)),)))
    persistent_batch.update(step(blocks=((5, (3,)),)))
    persistent_batch.update(step(blocks=((5, (-2, 6, 4)),)))
    send(persistent_batch)
    assert persistent_batch.tables[persistent_batch.row(5)].tolist() == [7, 3, 6, 4]
