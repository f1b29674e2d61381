"""The result of a row-parallel layer before its addends are summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.distributed.scattered_sum import ScatteredSum
    from engine.core.distributed.sum_exchange import ExchangedSum


NOT_A_TENSOR = "a PartialSum is one rank's addend, not a tensor; pass it to a norm of the LayerFactory or call reduce()"

USED_TWICE = (
    "the addends of a PartialSum were summed before; pass it to one norm or call reduce(), and keep what that returns"
)


class NotATensorError(TypeError, AttributeError):
    """A partial sum was used as a tensor: by an operation, or for an attribute."""


def sum_addends(addends: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of tensors of one dtype in their order, computed in float32 and rounded once.

    out: memory for the sum, which may be an addend's. None: new memory.
    """
    if len(addends) == 2:
        return torch.add(*addends, out=out)  # which computes in float32, too
    total = addends[0].float()
    for addend in addends[1:]:
        total = total + addend
    return total.to(addends[0].dtype) if out is None else out.copy_(total)


class PartialSum:
    """One rank's addend of a tensor that is the sum over all ranks.

    Not a tensor, so that a forgotten reduction is a TypeError with any number of ranks, instead of wrong results with
    more than one.
    """

    __slots__ = ("_addend", "_group")

    def __init__(self, addend: torch.Tensor, group: RankGroup) -> None:
        self._addend = addend
        self._group = group

    @property
    def addend(self) -> torch.Tensor:
        """This rank's addend."""
        return self._addend

    @property
    def group(self) -> RankGroup:
        """The ranks over which to sum."""
        return self._group

    def __add__(self, other: PartialSum) -> PartialSum:
        """The partial sum of both: one reduction does for two."""
        if not isinstance(other, PartialSum):
            raise NotATensorError(NOT_A_TENSOR)
        return PartialSum(self.addend + other.addend, self._group)

    def reduce(self) -> torch.Tensor:
        """The sum over all ranks. Called once: the addend may be overwritten."""
        return self._group.all_reduce(self._addend)

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        """Raise for every torch function called with a partial sum."""
        raise NotATensorError(NOT_A_TENSOR)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotATensorError(f"{name}: {NOT_A_TENSOR}")


class ReceivedSum(PartialSum):
    """A partial sum whose addends of all ranks this rank receives, so that a norm can add them."""

    __slots__ = ()

    def receive(self) -> Sequence[torch.Tensor]:
        """All ranks' addends. The caller adds them in this order, rounding once, before it calls `release`; a sum of
        the same rows is the same on all ranks. The current stream waits for the other ranks, not the host.

        A single tensor is the sum already; there is nothing to release then.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Let the other ranks send again, once the current stream has done what was launched before."""


class SplitSum(PartialSum):
    """A partial sum in chunks of rows, whose exchange with the other ranks is in progress next to computation."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: Sequence[ExchangedSum | ScatteredSum], group: RankGroup) -> None:
        self.chunks = chunks
        self._group = group

    @property
    def addend(self) -> torch.Tensor:
        """This rank's addend as a whole, which is then to be reduced with another sum: the exchange was in vain."""
        return torch.cat([chunk.withdraw() for chunk in self.chunks])

    def reduce(self) -> torch.Tensor:
        """The sum over all ranks."""
        return torch.cat([chunk.reduce() for chunk in self.chunks])
