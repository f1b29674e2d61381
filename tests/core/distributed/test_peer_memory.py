"""What is for peer memory, and what there is of it; how it sums is tested on GPUs (test_distributed)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from engine.core.distributed import peer_memory
from engine.core.distributed.peer_memory import PeerMemory
from engine.testing.ranks import LoneRank


class Shared:
    """In place of torch's symmetric memory: this process's own, of two ranks."""

    refused = ""

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any, name: str) -> torch.Tensor:
        if cls.refused:
            raise RuntimeError(cls.refused)
        return torch.full(size, 7, dtype=dtype)

    @staticmethod
    def rendezvous(buffer: torch.Tensor, name: str) -> Any:
        """As torch's does, it finds the group by its name."""
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


def test_small_sums_are_taken(shared: type[Shared]) -> None:
    memory = make(0)
    assert memory.takes(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert memory.takes(torch.zeros(peer_memory.MOST_BYTES // 4))
    assert not memory.takes(torch.zeros(peer_memory.MOST_BYTES // 4 + 4))
    assert not memory.takes(torch.zeros(0))
    assert not memory.takes(torch.zeros(3))
    assert not memory.takes(torch.zeros(8, dtype=torch.float16))
    assert memory.takes(torch.zeros(9)[1:]), "where a tensor lies may differ from rank to rank"


def test_memory_for_rows(shared: type[Shared]) -> None:
    memory = make(1)
    sums = memory.row_sums(4096, torch.bfloat16)
    assert (sums.rank, sums.ranks, sums.most_rows) == (1, 2, 128)
    assert memory.row_sums(4096, torch.bfloat16) is sums
    places, flags = sums.places.tolist(), sums.flags.tolist()
    assert [flag - place for flag, place in zip(flags, places, strict=True)] == [2 * 128 * 4096 * 2] * 2
    assert places[1] == 4096
    assert not sums.epochs.any()
    assert memory.row_sums(2**20, torch.float32).most_rows == 1


def test_none_where_there_are_no_kernels_or_a_rank_cannot(
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
    assert caplog.messages[-1].endswith("small sums take longer: no access to peers")


def test_a_closed_group_is_forgotten(shared: type[Shared]) -> None:
    memory = make(0)
    memory.close()
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        torch._C._distributed_c10d._resolve_process_group(memory._name)
