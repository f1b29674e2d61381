"""The CUDA driver's part of large sums, on the CPU: each rank is a thread, and operations run when launched."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from engine.core.distributed import stream_operations, sum_exchange, sum_scatter
from engine.core.distributed.overlapped_sums import Allocate
from engine.testing.ranks import LoneRank

T = TypeVar("T")


class ImmediateDriver:
    """Runs each operation when it is launched; a wait sleeps until another thread has set the flag."""

    def memory_operations(self, stream: int, count: int, operations: Any, flags: int) -> int:
        assert len(operations) == count
        for one in operations:
            flag = ctypes.c_int32.from_address(one.address)
            if one.operation == stream_operations.WRITE:
                flag.value = one.value
                continue
            deadline = time.monotonic() + 30
            while flag.value != one.value:
                assert time.monotonic() < deadline, "the other rank never set the flag"
                time.sleep(0.0001)
        return 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(target, source, nbytes)
        return 0

    def event(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> int:
        return 0

    def wait_event(self, stream: int, event: int, flags: int) -> int:
        return 0


class Meeting(LoneRank):
    """A rank that waits for the other ones."""

    def __init__(self, rank: int, ranks: int, barrier: Barrier, shared: dict[int, torch.Tensor]) -> None:
        super().__init__(rank, ranks)
        self._barrier = barrier
        self._shared = shared

    def minimum(self, number: int) -> int:
        self._barrier.wait(30)
        return number

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._shared[self.rank] = x
        self._barrier.wait(30)
        found = torch.stack([self._shared[rank] for rank in range(self.ranks)])
        self._barrier.wait(30)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Added in float32 and rounded once."""
        return self.all_gather(x).float().sum(0).to(x.dtype)


def patch_streams(monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> None:
    """Replace what needs a GPU. captures: whether the current stream is captured."""
    for module in (sum_exchange, sum_scatter):
        monkeypatch.setattr(module, "current_stream", lambda index: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: SimpleNamespace(cuda_stream=2))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    launch, lock = GridExecutor.__call__, Lock()

    def locked(*given: Any, **settings: Any) -> Any:
        with lock:  # Triton's interpreter runs one kernel at a time
            return launch(*given, **settings)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


def on_ranks(ranks: int, work: Callable[[Meeting, Allocate], T]) -> list[T]:
    """Run `work` on each rank, as a thread, with what allocates memory that all ranks reach."""
    memories: dict[int, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    barrier = Barrier(ranks)

    def run(rank: int) -> T:
        def allocate(nbytes: int) -> tuple[torch.Tensor, list[int]]:
            memories[rank] = torch.full((nbytes,), 7, dtype=torch.uint8)
            barrier.wait(30)
            return memories[rank], [memories[each].data_ptr() for each in range(ranks)]

        try:
            with torch.inference_mode():
                return work(Meeting(rank, ranks, barrier, shared), allocate)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
