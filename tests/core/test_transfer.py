import numpy as np
import pytest
import torch

from engine.core.transfer import HostCopy, to_device

ARRAYS = [
    np.arange(3, dtype=np.int64),
    np.array([[1, 2], [3, 4]], np.int32),
    np.zeros(0, np.int64),
    np.array([True, False]),
    np.array([0.5], np.float32),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_to_device_keeps_values_and_types(device: str) -> None:
    for array, tensor in zip(ARRAYS, to_device(ARRAYS, torch.device(device)), strict=True):
        assert tensor.device.type == device
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


def test_to_device_copies_on_a_cpu() -> None:
    array = np.arange(3)
    (tensor,) = to_device([array], torch.device("cpu"))
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_transfers_in_flight_do_not_mix() -> None:
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    sent = [to_device([np.full(1000, number)], device)[0] for number in range(200)]
    assert [int(tensor.sum()) for tensor in sent] == [1000 * number for number in range(200)]


@pytest.mark.gpu
def test_host_copies_keep_their_memory_until_they_are_done() -> None:
    """The memory of a copy that is dropped while in progress is not reused by the next copies."""
    source = torch.arange(1000, device="cuda")
    torch.cuda._sleep(500_000_000)
    for _ in range(50):
        HostCopy.begin(source)
    kept = [HostCopy.begin(source + number) for number in range(10)]
    expected = torch.arange(1000)
    for number, copy in enumerate(kept):
        assert torch.equal(copy.wait()[0], expected + number)
