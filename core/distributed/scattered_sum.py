"""A partial sum of which each rank sums and norms its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from engine.core.distributed.partial_sum import PartialSum, ReceivedSum, SplitSum, sum_addends
from engine.core.distributed.scattered_rows import part_rows

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.distributed.sum_scatter import SumScatter


class OwnRows(ReceivedSum):
    """The rows of a chunk that this rank sums, as the input of its norm. `addend` has all rows of the chunk."""

    __slots__ = ("_addends",)

    def __init__(self, addend: torch.Tensor, group: RankGroup, addends: Sequence[torch.Tensor]) -> None:
        super().__init__(addend, group)
        self._addends = addends

    def receive(self) -> Sequence[torch.Tensor]:
        return self._addends

    def reduce(self) -> torch.Tensor:
        return sum_addends(self._addends)


class ScatteredSum(PartialSum):
    """Rows of a partial sum, of which each rank is to sum its own part."""

    __slots__ = ("_copies", "_scatter", "_sum", "begin", "end", "gathered", "is_sent", "slot")

    def __init__(self, addend: torch.Tensor, group: RankGroup, scatter: SumScatter, slot: int) -> None:
        super().__init__(addend, group)
        self._scatter = scatter
        self._sum: torch.Tensor | None = None
        self._copies: list[torch.Tensor] | None = None
        """What `finish` returns, where the exchange had to end before `finish` was called."""
        self.slot = slot
        self.is_sent = False
        rows = addend.shape[0]
        part = part_rows(rows, group.ranks)
        self.begin = min(group.rank * part, rows)
        """The first of this rank's rows."""
        self.end = min(self.begin + part, rows)
        """The end of this rank's rows."""
        self.gathered: list[torch.Tensor] | None = None
        """Where all rows of the norm will be, once `gather` was called."""

    @property
    def is_reduced(self) -> bool:
        """Whether the sum had to be computed without a norm, and is a tensor already."""
        return self._sum is not None

    def norm_stream(self) -> AbstractContextManager[Any]:
        """Launches in the stream of norms, in which `receive` must be called and the norm be computed."""
        return self._scatter.norm_stream()

    def receive(self) -> OwnRows:
        """This rank's rows of the sum."""
        return self._scatter.receive(self)

    def order_norm_behind_current_stream(self) -> None:
        """Have the norm wait for what the current stream computes, not just for what it had when the sum started."""
        self._scatter.order_norm_behind_current_stream()

    def gather(self, made: Sequence[torch.Tensor]) -> None:
        """Send tensors to all ranks: [this rank's rows, ...], computed by the norm's stream."""
        self._scatter.gather(self, made)

    def finish(self) -> list[torch.Tensor]:
        """The tensors of `gather` with the rows of all ranks. The current stream waits for the other ranks, the host
        does not. The second sum that starts after this call may overwrite them."""
        return self._scatter.finish(self) if self._copies is None else self._copies

    def settle(self) -> None:
        """End the exchange now, so that another sum can start: move the norm, or the sum, to new memory."""
        if self.gathered is None:
            self.reduce()
        else:
            self._copies = [one.clone() for one in self.finish()]

    def reduce(self) -> torch.Tensor:
        """The sum over all ranks, in new memory. May be called again, but not behind `gather`."""
        if self._sum is None:
            with self.norm_stream():
                self.gather([self.receive().reduce()])
            [found] = self.finish()
            self._sum = found.clone()
        return self._sum

    def withdraw(self) -> torch.Tensor:
        """This rank's addend, which then is part of another sum; instead of `reduce`."""
        self.reduce()
        return self._addend


def scattered_chunks(hidden: object) -> Sequence[ScatteredSum] | None:
    """The chunks of a sum of which each rank is to sum and norm its own rows. None: not such a sum."""
    if not isinstance(hidden, SplitSum):
        return None
    found = [one for one in hidden.chunks if isinstance(one, ScatteredSum) and not one.is_reduced]
    return found if len(found) == len(hidden.chunks) else None
