import math
from typing import Any

import pytest
import torch

from engine.core.sampling.arithmetic import mix
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.transfer import tensor_to_device
from engine.core.types import SamplingParams

CPU = torch.device("cpu")


def test_write_fills_rows() -> None:
    table = SamplingTable(4, CPU)
    asked = SamplingParams(seed=2**63 - 1, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05)
    table.write([2, 0], [asked, SamplingParams(temperature=0)], [7, 3])
    assert table.keys[2] == mix(torch.tensor([2**63 - 1]))[0]
    assert table.num_outputs.tolist() == [3, 0, 7, 0, 0]
    assert table.temperature[2].item() == pytest.approx(0.7)
    assert table.top_k[2] == 40
    assert table.top_p[2].item() == pytest.approx(0.9)
    assert table.log_min_p[2].item() == pytest.approx(math.log(0.05))
    assert table.temperature[0] == 0
    assert table.log_min_p[0] == -math.inf


def test_write_leaves_other_rows() -> None:
    table = SamplingTable(3, CPU)
    table.write([0, 1], [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=2, top_k=3)], [1, 2])
    table.write([1], [SamplingParams(seed=3)], [0])
    assert table.num_outputs[:2].tolist() == [1, 0]
    assert table.top_p[:2].tolist() == [0.5, 1.0]
    assert table.top_k[:2].tolist() == [0, 0]
    table.write([], [], [])
    assert table.num_outputs[:2].tolist() == [1, 0]


def test_draft_rows_have_the_parameters_of_their_sequence_and_later_positions() -> None:
    table = SamplingTable(2, CPU, draft_rows=3)
    table.write([0, 1], [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=2, temperature=0)], [4, 9])
    table.copy_rows(torch.tensor([3, 4, 5]), torch.tensor([1, 0, 0]), torch.tensor([0, 0, 1]))
    assert table.num_outputs.tolist() == [4, 9, 0, 9, 4, 5]
    assert table.keys[3:].tolist() == table.keys[[1, 0, 0]].tolist()
    assert table.top_p[3:].tolist() == [1.0, 0.5, 0.5]
    assert table.temperature[3:].tolist() == [0.0, 1.0, 1.0]
    table.copy_rows(torch.tensor([3]), torch.tensor([0]), torch.tensor([2]))
    assert table.num_outputs[3] == 6


def test_padding_row_is_greedy_and_may_be_repeated() -> None:
    table = SamplingTable(2, CPU)
    assert table.padding_row == 2
    assert table.temperature[table.padding_row] == 0
    assert table.top_p[table.padding_row] == 1
    table.advance(torch.tensor([0, 2, 2, 2, 2]))
    assert table.num_outputs.tolist() == [1, 0, 4]


def test_columns_keep_their_addresses() -> None:
    """A captured graph reads the columns by address."""
    table = SamplingTable(2, CPU)
    tensors = list(table.columns.values())
    addresses = [each.data_ptr() for each in tensors]
    table.write([1], [SamplingParams(seed=5, top_k=2**31)], [9])
    table.advance(torch.tensor([1]))
    assert [each.data_ptr() for each in tensors] == addresses
    assert [table.keys.shape, table.num_outputs[1].item(), table.top_k[1].item()] == [(3,), 10, 2**31 - 1]


@pytest.mark.parametrize(("asked", "greedy"), [({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True)], ids=str)
def test_greedy_rows_have_temperature_zero(asked: dict[str, Any], greedy: bool) -> None:
    params = SamplingParams(seed=1, **asked)
    table = SamplingTable(1, CPU)
    table.write([0], [params], [0])
    assert params.greedy is greedy
    assert (table.temperature[0].item() == 0) is greedy


@pytest.mark.gpu
def test_writes_do_not_wait_and_do_not_mix() -> None:
    """Many writes while the device is busy: each arrives whole, and the host finishes before the device."""
    device = torch.device("cuda")
    table = SamplingTable(64, device)
    table.write([0], [SamplingParams(seed=1)], [1])
    blocks = [torch.empty(40, dtype=torch.uint8, pin_memory=True) for _ in range(160)]
    del blocks  # into the allocator's cache: to pin new ones may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    event = torch.cuda.Event()
    for row in range(64):
        table.write([row], [SamplingParams(seed=row, top_k=row + 1)], [row * 10])
        tensor_to_device(torch.full((5,), -1, dtype=torch.int64), device)
    event.record()
    assert not event.query()
    event.synchronize()
    assert table.num_outputs[:64].tolist() == [row * 10 for row in range(64)]
    assert table.keys[:64].tolist() == mix(torch.arange(64)).tolist()
