"""The batch of a step with drafts: filled by one kernel as by PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.runner.draft_batch import DraftBatch
from engine.core.runner.graph_capture import GraphCapturer
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.sampling.draft_rows import DraftRows
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.transfer import to_device
from engine.core.types import DraftSlice, NewSequence, SamplingParams, Step

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_RUNNING, BLOCK_SIZE, MAX_LEN = 6, 4, 700
NUMBERS = (11, 12, 13, 14)


class State:
    """Four running sequences with random blocks, tokens and parameters."""

    def __init__(self, seed: int, groups: int) -> None:
        pick = np.random.default_rng(seed)
        self.batch = PersistentBatch(
            max_running=MAX_RUNNING,
            max_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            scratch_block=0,
            device=DEVICE,
            groups_by_kind=(groups,),
            draft_rows=MAX_RUNNING,
        )
        self.table = SamplingTable(MAX_RUNNING, DEVICE, MAX_RUNNING)
        new = tuple(
            NewSequence(sequence=number, tokens=(1, 2), prompt_len=2, params=SamplingParams()) for number in NUMBERS
        )
        blocks = tuple(
            (number, tuple(pick.integers(1, 99, groups * MAX_LEN // BLOCK_SIZE).tolist())) for number in NUMBERS
        )
        self.batch.update(Step(id=1, decodes=(), chunks=(), new=new, blocks=blocks))
        self.positions = dict(zip(NUMBERS, pick.integers(0, MAX_LEN - 9, len(NUMBERS)).tolist(), strict=True))
        for number, at in self.positions.items():
            self.batch.computed[self.batch.row(number)] = at
        params = [SamplingParams(temperature=0.1 * one, top_p=0.5, seed=one, top_k=one) for one in range(1, 5)]
        self.table.write([self.batch.row(number) for number in NUMBERS], params, [5, 6, 7, 8])
        self.rows, self.filled = (torch.full((10,), -1, dtype=torch.int64, device=DEVICE) for _ in range(2))

    def step(self, decodes: tuple[int, ...], *counts: int) -> Step:
        """Step with `counts` drafts for the sequences that do not decode alone."""
        others = [number for number in NUMBERS if number not in decodes]
        slices = tuple(
            DraftSlice(number, self.positions[number], tuple(range(number, number + 1 + count)))
            for number, count in zip(others, counts, strict=False)
        )
        return Step(id=2, decodes=decodes, chunks=(), drafts=slices)

    def send(self, step: Step, size: int, *, fused: bool) -> tuple[DraftRows, torch.Tensor]:
        sender = DraftBatch(self.batch, self.table, rows=self.rows, positions=self.filled, max_drafts=3, fused=fused)
        if fused and DEVICE.type == "cuda":
            sender.capture(GraphCapturer(DEVICE))
        return sender.send(step, size)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("decodes", "counts", "size"), [((), (1,), 2), ((12,), (2, 1), 8), ((14, 11), (3,), 6), ((), (2, 1), 5)], ids=str
)
def test_one_kernel_fills_the_batch_as_separate_operations_do(
    groups: int, decodes: tuple[int, ...], counts: tuple[int, ...], size: int
) -> None:
    one, other = State(3, groups), State(3, groups)
    step = one.step(decodes, *counts)
    (rows, owners), (expected_rows, expected_owners) = (
        one.send(step, size, fused=True),
        other.send(step, size, fused=False),
    )
    assert torch.equal(owners, expected_owners)
    for name in ("drafts", "first", "table_rows", "offsets"):
        assert torch.equal(getattr(rows, name), getattr(expected_rows, name))
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.filled, other.filled)
    assert torch.equal(one.table.words, other.table.words)
    assert torch.equal(one.table.numbers, other.table.numbers)
    assert torch.equal(one.batch.last_tokens, other.batch.last_tokens)
    for at in range(len(decodes) + sum(counts) + len(counts)):
        row, needed = int(one.rows[at]), int(one.filled[at]) // BLOCK_SIZE + 1
        assert torch.equal(one.batch.group_tables[:, row, :needed], other.batch.group_tables[:, row, :needed])


def test_rows_have_the_positions_and_tokens_of_their_slice_and_the_rest_is_padding() -> None:
    state = State(5, 1)
    rows, owners = state.send(state.step((12,), 2, 1), 8, fused=True)
    at = state.positions
    assert state.filled[:8].tolist() == [at[12], at[11], at[11] + 1, at[11] + 2, at[13], at[13] + 1, 0, 0]
    first = state.batch.draft_rows[0]
    row_of = state.batch.row
    assert state.rows.tolist() == [row_of(12), *range(first, first + 5), MAX_RUNNING, MAX_RUNNING, -1, -1]
    assert owners.tolist() == [row_of(11)] * 3 + [row_of(13)] * 2
    assert state.batch.last_tokens[first : first + 5].tolist() == [11, 12, 13, 13, 14]
    assert rows.drafts.tolist() == [[12, 13], [14, -1]]
    assert state.table.num_outputs[first : first + 5].tolist() == [5, 6, 7, 7, 8]
    assert state.batch.computed[row_of(12)] == at[12] + 1


def test_the_rows_of_sequences_stay_as_they_were() -> None:
    state = State(1, 1)
    state.batch.apply(to_device(state.batch.take_changes(), DEVICE))

    def of_sequences() -> list[torch.Tensor]:
        columns = (state.table.words, state.table.numbers, state.batch.tables.T, state.batch.last_tokens)
        return [column[..., : MAX_RUNNING + 1].clone() for column in columns]

    before = of_sequences()
    state.send(state.step(NUMBERS[1:], 1), 8, fused=True)
    assert all(map(torch.equal, before, of_sequences()))


def test_a_second_batch_replaces_the_first() -> None:
    state, expected = State(2, 1), State(2, 1)
    sender = DraftBatch(state.batch, state.table, rows=state.rows, positions=state.filled, max_drafts=3, fused=True)
    sender.send(state.step((), 3, 2, 1), 10)
    rows, _ = sender.send(state.step((14,), 1), 4)
    expected.batch.computed[:] = state.batch.computed
    expected.batch.computed[expected.batch.row(14)] -= 1
    expected_rows, _ = expected.send(expected.step((14,), 1), 4, fused=False)
    assert torch.equal(state.rows[:4], expected.rows[:4])
    assert torch.equal(state.filled[:4], expected.filled[:4])
    assert rows.drafts.tolist() == expected_rows.drafts.tolist()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_new_blocks_arrive_before_the_draft_rows_copy_them(groups: int, *, fused: bool) -> None:
    state = State(4, groups)
    sender = DraftBatch(state.batch, state.table, rows=state.rows, positions=state.filled, max_drafts=3, fused=fused)
    if fused and DEVICE.type == "cuda":
        sender.capture(GraphCapturer(DEVICE))
    sender.send(state.step((), 1), 2)
    sequence = NUMBERS[0]
    last = state.positions[sequence] // BLOCK_SIZE
    blocks = (-last, *range(200, 200 + 2 * groups))  # those of the last two indices, for each group
    state.batch.update(Step(id=3, decodes=(), chunks=(), blocks=((sequence, blocks),)))
    sender.send(state.step((), 1), 2)
    row, draft_row = state.batch.row(sequence), state.batch.draft_rows[0]
    tables = state.batch.group_tables.cpu()
    assert tables[:, row, last].tolist() == list(range(200, 200 + groups))
    assert tables[:, draft_row, : last + 1].tolist() == tables[:, row, : last + 1].tolist()
    assert tables[:, row].tolist() == state.batch.group_host_tables[:, row].tolist()
