import pytest
import torch

from engine.core.runner.persistent_batch import Residents
from engine.core.runner.transfer import to_device
from engine.core.types import NewSequence, SamplingParams, Step


def new(sequence: int, tokens: tuple[int, ...] = (1,), prompt_len: int | None = None) -> NewSequence:
    prompt = len(tokens) if prompt_len is None else prompt_len
    return NewSequence(sequence=sequence, tokens=tokens, prompt_len=prompt, params=SamplingParams())


def step(**changes: object) -> Step:
    return Step(id=0, decodes=(), chunks=(), **changes)


def send(residents: Residents) -> None:
    residents.apply(to_device(residents.take_changes(), residents.tables.device))


@pytest.fixture
def residents() -> Residents:
    return Residents(max_running=3, max_len=16, page_size=4, scratch_block=99, device=torch.device("cpu"))


def test_tables_on_the_device_follow_those_on_the_host(residents: Residents) -> None:
    residents.update(step(new=(new(5), new(6)), blocks=((5, (7, 8)), (6, (1,)))))
    residents.update(step(blocks=((6, (2, 3)), (5, (9,)))))
    send(residents)
    assert residents.tables[residents.row(5)].tolist() == [7, 8, 9, 99]
    assert residents.tables[residents.row(6)].tolist() == [1, 2, 3, 99]
    assert residents.host_tables[residents.row(6), :3].tolist() == [1, 2, 3]


def test_changes_are_sent_once(residents: Residents) -> None:
    residents.update(step(new=(new(5),), blocks=((5, (7,)),)))
    assert residents.take_changes()
    assert residents.take_changes() == []
    residents.apply([])


def test_padding_leads_to_the_scratch_block(residents: Residents) -> None:
    residents.update(step(new=tuple(new(i) for i in range(3)), blocks=tuple((i, (i,)) for i in range(3))))
    send(residents)
    assert residents.padding_row not in residents.rows((0, 1, 2)).tolist()
    assert residents.tables[residents.padding_row].tolist() == [99] * 4


def test_a_row_is_used_again_from_its_beginning(residents: Residents) -> None:
    for sequence in range(10):
        gone = (sequence - 1,) if sequence else ()
        residents.update(step(new=(new(sequence),), blocks=((sequence, (sequence,)),), finished=gone))
        send(residents)
        row = residents.row(sequence)
        assert residents.tables[row, 0] == sequence
        assert residents.computed[row] == 0
        residents.computed[row] = 7


@pytest.mark.parametrize(("start", "count", "targets"), [(0, 2, [1, 2]), (2, 2, [3]), (3, 1, []), (0, 6, [1, 2, 3])])
def test_prompt_targets_end_with_the_prompt(residents: Residents, start: int, count: int, targets: list[int]) -> None:
    resumed = new(0, tuple(range(6)), prompt_len=4)
    residents.update(step(new=(resumed,)))
    assert residents.prompt_targets(resumed, start, count).tolist() == targets
