"""Sums over the ranks that run next to computation: what the kinds for two and for more ranks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine.core.distributed.stream_operations import Driver
from engine.core.errors import ExecutorError

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.distributed.scattered_sum import ScatteredSum
    from engine.core.distributed.sum_exchange import ExchangedSum

Allocate = Callable[[int], tuple[torch.Tensor, Sequence[int]]]
"""Makes memory of that many bytes that all ranks can reach, and returns it and the ranks' addresses of it."""
CHUNK_MULTIPLE = 128
"""Rows of a tile of the GEMMs: a chunk of other sizes computes tiles in part."""
ALIGNMENT = 256
"""Bytes: tensors in the ranks' memory begin at multiples of this."""


def first_rows(rows: int) -> int:
    """Number of rows in the first of two chunks."""
    return round_up(rows, 2 * CHUNK_MULTIPLE) // 2


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple


class OverlappedSums(ABC):
    """Sums the addends of all ranks in two chunks of rows, each while the ranks compute something else."""

    min_rows: ClassVar[int]
    """Smaller sums are not split."""
    nbytes: int
    """Bytes of the memory that other ranks write to."""

    def __init__(
        self,
        driver: Driver,
        group: RankGroup,
        allocate: Allocate,
        device: torch.device,
        *,
        max_rows: int,
        size: int,
        dtype: torch.dtype,
    ) -> None:
        """driver: what `Driver.find` found, on all ranks. max_rows: of a whole sum; size: numbers per row."""
        self._driver = driver
        self._group = group
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.max_rows = max_rows
        self.size = size
        self.dtype = dtype
        self.is_alone = False
        """Whether this rank computes alone, so that its addends are the sums."""
        self._open(allocate, device)

    @abstractmethod
    def _open(self, allocate: Allocate, device: torch.device) -> None:
        """Allocate the memory, and make streams and events."""

    def supports(self, size: int, dtype: str) -> bool:
        """Whether rows of that many numbers of this dtype can be summed."""
        return size == self.size and getattr(torch, dtype) == self.dtype

    def split(self, rows: int) -> int | None:
        """Number of rows in the first of two chunks. None: too few rows, or too many."""
        return first_rows(rows) if self.min_rows <= rows <= self.max_rows else None

    @abstractmethod
    def start(self, addend: torch.Tensor) -> ExchangedSum | ScatteredSum:
        """Sum a chunk of rows: [rows, size], once the current stream has computed them."""

    def _run(self, stream: int, operations: Any) -> int:
        """Launch memory operations. Returns the driver's error, or 0."""
        return self._driver.memory_operations(stream, len(operations), operations, 0)

    def _check(self, failed: int) -> None:
        """failed: the result of calls of the driver, of which the first that fails ends a sum. Raises ExecutorError."""
        if failed:
            group = self._group
            raise ExecutorError(
                f"rank {group.rank} of {group.ranks}: a sum next to computation failed: CUDA error {failed};"
                " --overlap-sums off uses none"
            )
