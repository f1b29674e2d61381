from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.core.errors import CheckpointError
from engine.core.weights import tensor_file
from engine.core.weights.readers import ReaderPool
from engine.core.weights.tensor_file import TensorFile

TENSORS = {
    "cube": torch.arange(6 * 8 * 10, dtype=torch.int32).view(6, 8, 10),
    "half": torch.arange(48, dtype=torch.bfloat16).view(6, 8),
    "eight": torch.arange(48).view(8, 6).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(params=["whole", "small tasks", "run by run"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorFile:
    """Read in three ways: in large tasks, in tasks of few bytes, and in one task per run."""
    if request.param == "small tasks":
        monkeypatch.setattr(tensor_file, "MAX_TASK_BYTES", 256)
    if request.param == "run by run":
        monkeypatch.setattr(tensor_file, "MIN_READ_BYTES", 1)
    save_file(TENSORS, tmp_path / "some.safetensors", {"format": "pt"})
    return TensorFile(tmp_path / "some.safetensors")


def read(file: TensorFile, name: str, shape: Sequence[int], dim: int, index: int) -> torch.Tensor:
    target = torch.full(tuple(shape), 1).to(TENSORS[name].dtype)
    tasks = list(file.read_tasks(name, dim, index, target))
    assert sum(task.target.numel() for task in tasks) == target.nbytes
    with ReaderPool("cpu", 3) as readers:
        readers.submit(tasks).wait()
    return target


def test_header_has_dtypes_and_shapes(file: TensorFile) -> None:
    assert {name: list(one.shape) for name, one in file.tensors.items()} == {
        name: list(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert file.tensors["half"].dtype == "bfloat16"
    assert file.tensors["flags"].dtype == "bool"


@pytest.mark.parametrize("name", TENSORS)
def test_whole_tensor_is_read(file: TensorFile, name: str) -> None:
    whole = TENSORS[name]
    assert torch.equal(read(file, name, whole.shape, 0, 0).view(-1), whole.view(-1))


@pytest.mark.parametrize(
    ("name", "dim", "ranks"), [("cube", 0, 3), ("cube", 1, 2), ("cube", 2, 5), ("half", 1, 4), ("eight", 1, 3)]
)
def test_slice_of_a_tensor_is_read(file: TensorFile, name: str, dim: int, ranks: int) -> None:
    whole = TENSORS[name]
    for rank, part in enumerate(whole.view(torch.uint8).view(*whole.shape, -1).chunk(ranks, dim)):
        found = read(file, name, part.shape[:-1], dim, rank * part.shape[dim])
        assert torch.equal(found.view(torch.uint8).view(part.shape), part)


def test_tasks_are_no_longer_than_the_limit(file: TensorFile) -> None:
    tasks = file.read_tasks("cube", 2, 0, torch.empty(6, 8, 5, dtype=torch.int32))
    assert all(0 < task.target.numel() <= tensor_file.MAX_TASK_BYTES for task in tasks)


def test_file_is_closed_with_its_last_reference(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "some.safetensors")
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = TensorFile(tmp_path / "some.safetensors")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    del file
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_file_in_another_format_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "some.safetensors").write_bytes(b"\x10" + b"\0" * 40)
    with pytest.raises(CheckpointError, match=r"some\.safetensors is damaged or cut short \(41 bytes"):
        TensorFile(tmp_path / "some.safetensors")
