"""PeerMemory's limits, allocation and refusals on the CPU. Its all-reduces are tested on GPUs (test_rank_group.py)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from engine.core.distributed import peer_memory, stream_operations
from engine.core.distributed.peer_memory import PeerMemory
from engine.testing.ranks import LoneRank


class Shared:
    """Stands in for torch's symmetric memory: memory of this process, for two ranks."""

    refused = ""

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any, name: str) -> torch.Tensor:
        if cls.refused:
            raise RuntimeError(cls.refused)
        return torch.full(size, 7, dtype=dtype)

    @staticmethod
    def rendezvous(buffer: torch.Tensor, name: str) -> Any:
        """Finds the group by its name, as torch does."""
        assert torch._C._distributed_c10d._resolve_process_group(name).size() == 2
        return SimpleNamespace(buffer_ptrs=[buffer.data_ptr(), 4096])


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> type[Shared]:
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", Shared)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peer_memory.torch, "device", lambda *names: "cpu")
    monkeypatch.setattr(Shared, "refused", "")
    return Shared


def make(rank: int) -> PeerMemory:
    store = torch._C._distributed_c10d.HashStore()
    return PeerMemory(uuid4().hex, LoneRank(rank, 2), store, torch.device("cpu"))


def test_peer_memory_supports_small_aligned_tensors(shared: type[Shared]) -> None:
    memory = make(0)
    assert memory.supports(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert memory.supports(torch.zeros(peer_memory.MAX_BYTES // 4))
    assert not memory.supports(torch.zeros(peer_memory.MAX_BYTES // 4 + 4))
    assert not memory.supports(torch.zeros(0))
    assert not memory.supports(torch.zeros(3))
    assert not memory.supports(torch.zeros(8, dtype=torch.float16))
    assert memory.supports(torch.zeros(9)[1:]), "a tensor's address may differ from rank to rank"


def test_reduce_buffers_are_empty_and_limited_in_bytes_and_rows(shared: type[Shared]) -> None:
    memory = make(1)
    buffers = memory.reduce_buffers(4096, torch.bfloat16)
    assert buffers is not None
    assert (buffers.rank, buffers.ranks, buffers.max_rows, buffers.one_shot_rows) == (1, 2, 1024, 256)
    assert memory.reduce_buffers(4096, torch.bfloat16) is buffers
    assert buffers.messages.tolist()[1] == 4096
    own = memory._reduce_buffers[4096, torch.bfloat16][1]
    assert own.nbytes == 2 * 1024 * 2 * 4096 * 2, "two buffers of 1024 rows of two ranks"
    assert (own.view(torch.int32) == -1).all()
    assert not buffers.epochs.any()
    large, small = memory.reduce_buffers(2**21, torch.float32), memory.reduce_buffers(64, torch.bfloat16)
    assert large is not None
    assert small is not None
    assert (large.max_rows, large.one_shot_rows, small.max_rows) == (1, 0, 1024)
    assert memory.reduce_buffers(2**21 + 1, torch.float32) is None, "a row is larger than the limit"
    assert memory.reduce_buffers(33, torch.bfloat16) is None, "a row is not whole words"


def test_sums_are_not_exchanged_by_more_ranks_or_without_a_driver(
    shared: type[Shared], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make(0)
    monkeypatch.setattr(stream_operations.Driver, "find", lambda device: None)
    assert memory.overlapped_sums(4096, 64, torch.bfloat16) is None
    monkeypatch.setattr(stream_operations.Driver, "find", lambda device: pytest.fail("must not be asked"))
    assert memory.overlapped_sums(4096, 65, torch.bfloat16) is None, "rows are not aligned"
    memory._group = LoneRank(0, 8)
    assert memory.overlapped_sums(4096, 64, torch.bfloat16) is None
    memory._group = LoneRank(0, 4)
    assert memory.overlapped_sums(4095, 64, torch.bfloat16) is None, "no sum has enough rows"


def test_open_returns_none_if_there_are_no_kernels_or_a_rank_cannot_map(
    shared: type[Shared], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert PeerMemory.open(LoneRank(0, 3), torch._C._distributed_c10d.HashStore()) is None
    assert PeerMemory.open(LoneRank(0, 2), torch._C._distributed_c10d.HashStore()) is not None
    monkeypatch.setattr(LoneRank, "minimum", lambda self, number: 0)
    with caplog.at_level(logging.WARNING):
        assert PeerMemory.open(LoneRank(0, 2), torch._C._distributed_c10d.HashStore()) is None
    assert "another rank cannot" in caplog.text
    monkeypatch.setattr(shared, "refused", "no access to peers\nat some line")
    with caplog.at_level(logging.WARNING):
        assert PeerMemory.open(LoneRank(0, 2), torch._C._distributed_c10d.HashStore()) is None
    assert caplog.messages[-1].endswith("small all-reduces take longer: no access to peers")


@pytest.mark.parametrize("refused", ["", "no access to peers"], ids=["another rank", "this rank"])
def test_open_unregisters_the_group_when_a_rank_cannot_map(
    shared: type[Shared], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(LoneRank, "minimum", lambda self, number: 0)
    monkeypatch.setattr(shared, "refused", refused)
    store = torch._C._distributed_c10d.HashStore()
    assert PeerMemory.open(LoneRank(0, 2), store) is None
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        torch._C._distributed_c10d._resolve_process_group(store.get("name").decode())


def test_close_unregisters_the_group(shared: type[Shared]) -> None:
    memory = make(0)
    memory.close()
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        torch._C._distributed_c10d._resolve_process_group(memory._name)
