"""Rows of a tensor that are divided among the ranks, such as the residual between norms by parts of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup

T = TypeVar("T")


class ScatteredRows:
    """A tensor whose rows are divided among the ranks: each rank has a part of every chunk of rows.

    Norms by parts of rows take and return it as the residual, and read no other rank's rows. Every other use as a
    tensor, also of attributes but for those below, first gathers all rows from all ranks, so that all ranks must use it
    alike.
    """

    def __init__(self, parts: Sequence[torch.Tensor], chunks: Sequence[int], group: RankGroup) -> None:
        """parts: this rank's rows of each chunk; chunks: the number of rows of each chunk on all ranks."""
        self.parts = list(parts)
        self.chunks = tuple(chunks)
        self._group = group
        self._whole: torch.Tensor | None = None

    def as_tensor(self) -> torch.Tensor:
        """This object, for a type checker that knows a residual as a tensor."""
        return cast(torch.Tensor, self)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor with all ranks' rows."""
        return torch.Size((len(self), *self.parts[0].shape[1:]))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.parts[0].ndim

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's rows."""
        return self.parts[0].device

    @property
    def is_gathered(self) -> bool:
        """Whether `whole` was called. Its result may have been written to since, which the parts do not show."""
        return self._whole is not None

    def whole(self) -> torch.Tensor:
        """All rows. The current stream must have waited for the norms that computed the parts."""
        if self._whole is None:
            found = []
            for part, rows in zip(self.parts, self.chunks, strict=True):
                size = part_rows(rows, self._group.ranks)
                padding = part.new_zeros(size - len(part), part.shape[1])
                padded = torch.cat([part, padding]) if len(padding) else part
                found.append(self._group.all_gather(padded).flatten(0, 1)[:rows])
            self._whole = torch.cat(found)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with all rows."""
        return function(*tree_map(whole_rows, args), **tree_map(whole_rows, dict(kwargs or {})))

    def __getattr__(self, name: str) -> Any:
        if "_whole" not in self.__dict__:  # copy.copy asks before it has set any attribute
            raise AttributeError(name)
        return getattr(self.whole(), name)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return sum(self.chunks)


def whole_rows(rows: T) -> T:
    """A tensor, or anything else, as such; all rows of ScatteredRows."""
    return cast(T, rows.whole()) if isinstance(rows, ScatteredRows) else rows


def _of_all_rows(name: str) -> Callable[..., Any]:
    """The operator of this name, with all rows."""

    def operator(self: ScatteredRows, *others: Any) -> Any:
        return getattr(self.whole(), name)(*map(whole_rows, others))

    return operator


# Python finds operators in the class only, not by __getattr__.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(ScatteredRows, _operator, _of_all_rows(_operator))
for _name in ("neg", "abs", "getitem", "setitem", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ScatteredRows, f"__{_name}__", _of_all_rows(f"__{_name}__"))


def part_rows(rows: int, ranks: int) -> int:
    """Rows per rank of a chunk of that many; the last parts may be smaller."""
    return -(-rows // ranks)
