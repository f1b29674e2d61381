"""The forms of a SkinnyLaunch, one per kernel: what the kernel is compiled for, and its arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine.ops.gemm import skinny, skinny_matrix, w16_few_rows

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

    from engine.ops.gemm.skinny_launch import GemmShape, SkinnyTile, Workspace

MIN_COLUMNS = 16
"""Rows of x that a matrix tile has at least; those beyond the last are zero."""
VECTOR_ROWS = (1, 2, 4)
"""Numbers of rows of x that the vector kernel is compiled for."""
LARGE = 2**23
"""Minimum number of weights with which the next kernel is released at the end: reading them takes some microseconds."""
FEW_ROWS_REGISTERS = {(4, 6): 168, (8, 4): 128, (4, 4): 128}
"""(warps, stages) of the candidates of the form few_rows, and their maximum registers per thread: those of three
programs per multiprocessor, of two and of four."""


class Form(ABC):
    """A kernel of a SkinnyLaunch: what it is compiled for, and its arguments."""

    prefetches: ClassVar[bool] = True
    """Whether the kernel can prefetch W (SkinnyTile.ahead)."""

    def __init__(self, kernel: JITFunction[Any], constants: Mapping[str, object]) -> None:
        self.kernel = kernel
        self.constants = constants
        """Beyond TILE, EPILOGUE and BIAS, which all kernels have."""

    @abstractmethod
    def arguments(
        self, out: torch.Tensor, tokens: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """The kernel's arguments. tokens: for argmax only, else `out`. x: contiguous."""

    @staticmethod
    @abstractmethod
    def settings(tile: SkinnyTile) -> str:
        """The settings that only some forms have, for the tile's name."""


class _Prefetching(Form):
    """A kernel that can prefetch W. Both such kernels take the same arguments, save for the memory of split-K."""

    def __init__(
        self,
        kernel: JITFunction[Any],
        shape: GemmShape,
        tile: SkinnyTile,
        constants: Mapping[str, object],
        scratch: tuple[torch.Tensor, ...] = (),
    ) -> None:
        common = {
            "BLOCK_K": tile.block_k,
            "THREADS": tile.warps * 32,
            "LATE_RELEASE": shape.weight_rows * shape.inputs >= LARGE,
        }
        super().__init__(kernel, {**common, **constants})
        self._scratch = scratch
        self._sizes = (shape.outputs, shape.inputs, tile.ahead)

    def arguments(self, out, tokens, x, weight, bias):
        bias = weight if bias is None else bias
        return (out, tokens, x, weight, bias, *self._scratch, x.shape[0], *self._sizes)


class Vector(_Prefetching):
    """Multiplies without tensor cores, for up to 4 rows of x."""

    def __init__(self, shape: GemmShape, tile: SkinnyTile, rows: int, workspace: Workspace) -> None:
        super().__init__(
            skinny.vector_kernel, shape, tile, {"ROWS": next(size for size in VECTOR_ROWS if size >= rows)}
        )

    @staticmethod
    def settings(tile: SkinnyTile) -> str:
        return f"{tile.ahead} bytes ahead"


class Matrix(_Prefetching):
    """Multiplies by tensor cores, with split-K."""

    def __init__(self, shape: GemmShape, tile: SkinnyTile, rows: int, workspace: Workspace) -> None:
        columns = columns_for(rows)
        constants = {
            "COLUMNS": columns,
            "STAGES": tile.stages,
            "SPLIT": tile.splits > 1,
            "POLLED": workspace.polled(tile.splits, tile.rows * columns, tile.programs(shape)),
            "ASM": workspace.supports_ptx,
        }
        scratch = (workspace.partials, workspace.arrivals, workspace.polled_sums)
        super().__init__(skinny_matrix.matrix_kernel, shape, tile, constants, scratch)

    @staticmethod
    def settings(tile: SkinnyTile) -> str:
        return f"{tile.stages} stages, {tile.splits} splits, {tile.ahead} bytes ahead"


class FewRows(Form):
    """Multiplies by tensor cores without shared memory, for up to 8 rows of x. Not for argmax."""

    prefetches = False

    def __init__(self, shape: GemmShape, tile: SkinnyTile, rows: int, workspace: Workspace) -> None:
        constants = {
            "AHEAD": tile.stages,
            "WHOLE_BLOCKS": shape.inputs % tile.block_k == 0,
            "maxnreg": FEW_ROWS_REGISTERS[tile.warps, tile.stages],
        }
        super().__init__(w16_few_rows.w16_few_rows_kernel, constants)
        self._sizes = (shape.weight_rows, shape.inputs, -(-shape.inputs // tile.block_k))

    def arguments(self, out, tokens, x, weight, bias):
        pairs = x.view(torch.int32), weight.view(torch.int32)
        return (out, *pairs, out if bias is None else bias, x.shape[0], *self._sizes)

    @staticmethod
    def settings(tile: SkinnyTile) -> str:
        return f"{tile.stages} stages"


FORMS: Mapping[str, type[Vector | Matrix | FewRows]] = {"vector": Vector, "matrix": Matrix, "few_rows": FewRows}
"""By SkinnyTile.form."""


def columns_for(rows: int) -> int:
    """Columns of a matrix tile for that many rows of x."""
    return max(1 << (rows - 1).bit_length(), MIN_COLUMNS)
