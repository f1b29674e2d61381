"""Launches of the kernels for few rows and eight-bit weights: how the work is cut up."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from attrs import evolve, field, frozen

from engine.core.kernels.launch import dependent_launch, num_sms
from engine.plugins.kernels import skinny8

VECTOR_ROWS = (1, 2, 4)
"""Rows of x that the vector kernel is compiled for."""
COLUMNS = (16, 32, 64, 128)
"""Rows of x that a program of the matrix kernel has; for more, several programs share a tile of W."""
MOST_SPLITS = 16
MOST_PROGRAMS = 8192
"""Tiles whose columns of W are shared out."""
MOST_SUMS = 2**22
"""Numbers that all programs together may leave for the last of each tile."""
WAVES = 1.5
"""Programs a multiprocessor, at least, that splitting aims at."""


@frozen(kw_only=True)
class Problem:
    """A multiplication by one weight."""

    weight_rows: int
    """Outputs; when gated, twice as many."""
    inputs: int
    scale_rows: int = 0
    """Outputs that share a scale with 128 inputs; 0: each output has one scale."""
    gated: bool = False

    @property
    def outputs(self) -> int:
        """Of the result."""
        return self.weight_rows // 2 if self.gated else self.weight_rows


@frozen(kw_only=True)
class Tile:
    """What a program takes at once."""

    form: str
    """vector or matrix."""
    rows: int
    """Of W; vector and gated: of the gate, and as many of up."""
    block_k: int
    """Columns of W."""
    warps: int
    stages: int = 1
    """Tiles on their way to shared memory at once; matrix only."""
    columns: int = 0
    """Rows of x; matrix only."""
    splits: int = 1
    """Programs that share the columns of one tile; matrix only."""
    ahead: int = 0
    """Bytes of each row of W to bring into the L2 cache before x is there."""

    def __str__(self) -> str:
        more = f"x{self.columns}, {self.stages} stages, {self.splits} splits" if self.form == "matrix" else ""
        return f"{self.form} {self.rows}x{self.block_k}{more}, {self.warps} warps, {self.ahead} bytes ahead"

    def programs(self, problem: Problem) -> int:
        """Tiles that W has."""
        return -(-(problem.outputs if self.form == "vector" else problem.weight_rows) // self.rows)


VECTOR_TILES = {
    1: Tile(form="vector", rows=8, block_k=1024, warps=4),
    2: Tile(form="vector", rows=4, block_k=1024, warps=4),
    4: Tile(form="vector", rows=4, block_k=1024, warps=4),
}
"""By rows of x. When gated, half the rows, as there are two tiles in registers."""
MOST_VECTOR_TILE = max(tile.rows for tile in VECTOR_TILES.values())
MATRIX_TILES = {
    16: Tile(form="matrix", rows=64, block_k=256, warps=4, stages=4, columns=16),
    32: Tile(form="matrix", rows=64, block_k=128, warps=4, stages=4, columns=32),
    64: Tile(form="matrix", rows=64, block_k=128, warps=4, stages=5, columns=64),
    128: Tile(form="matrix", rows=128, block_k=128, warps=8, stages=4, columns=128),
}
"""By columns. Each stage holds rows * block_k bytes of W and columns * block_k numbers of x."""
AHEAD = 16384
"""Bytes a program brings into the L2 cache in advance, of all its rows together."""


def default_tile(problem: Problem, rows: int, device: torch.device, *, codes: bool, vector: bool = True) -> Tile:
    """How to cut up the product of `rows` rows. codes: x is made of codes; vector: that form may be taken."""
    if vector and not codes and rows <= VECTOR_ROWS[-1]:
        tile = VECTOR_TILES[next(size for size in VECTOR_ROWS if size >= rows)]
        if problem.gated:
            tile = evolve(tile, rows=tile.rows // 2)
        if problem.scale_rows == 0 or problem.scale_rows % tile.rows == 0:
            block_k = min(tile.block_k, max(128, triton.next_power_of_2(problem.inputs)))
            return with_ahead(evolve(tile, block_k=block_k), problem)
    tile = MATRIX_TILES[next((size for size in COLUMNS if size >= rows), COLUMNS[-1])]
    if problem.scale_rows:
        tile = evolve(tile, block_k=skinny8.GROUP.value)
    return with_ahead(split(evolve(tile, stages=_stages(tile, codes, device)), problem, rows, device), problem)


def with_ahead(tile: Tile, problem: Problem, budget: int = AHEAD) -> Tile:
    """The same tile with weights fetched in advance, where rows of W start at multiples of 16 bytes."""
    return evolve(tile, ahead=0 if problem.inputs % 16 else min(budget // tile.rows, problem.inputs))


def split(tile: Tile, problem: Problem, rows: int, device: torch.device) -> Tile:
    """The same with columns shared out so that every multiprocessor has something to do, where that can be."""
    programs, splits = tile.programs(problem) * -(-rows // tile.columns), 1
    most = min(MOST_SPLITS, problem.inputs // (2 * tile.block_k))
    numbers = programs * tile.rows * tile.columns
    while (
        programs * splits < num_sms(device) * WAVES
        and splits * 2 <= most
        and programs <= MOST_PROGRAMS
        and numbers * splits * 2 <= MOST_SUMS
    ):
        splits *= 2
    return evolve(tile, splits=splits)


def _stages(tile: Tile, codes: bool, device: torch.device) -> int:
    """As many as shared memory holds, but no more than the tile asks for."""
    stage = (tile.rows + tile.columns * (1 if codes else 2)) * tile.block_k
    return max(1, min(tile.stages, _shared_memory(device) // stage))


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**17
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"]) - 2048  # which the compiler may want for itself


@frozen
class Workspace:
    """Where programs that share a tile leave their sums; one for all layers, as their kernels follow each other."""

    device: torch.device
    partials: torch.Tensor = field()
    arrivals: torch.Tensor = field()

    @partials.default
    def _make_partials(self) -> torch.Tensor:
        return torch.empty(MOST_SUMS, dtype=torch.float32, device=self.device)

    @arrivals.default
    def _make_arrivals(self) -> torch.Tensor:
        return torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=self.device)


class Launch:
    """One kernel for one problem and up to so many rows."""

    def __init__(self, problem: Problem, tile: Tile, rows: int, workspace: Workspace, *, codes: bool = False) -> None:
        """rows: at most 4 for the vector form. codes: x is made of codes; matrix form only."""
        self.problem = problem
        self.tile = tile
        self._codes = codes
        self._sizes = (problem.outputs, problem.inputs, max(problem.scale_rows, 1))
        self._constants = {
            "TILE": tile.rows,
            "BLOCK_K": tile.block_k,
            "THREADS": tile.warps * 32,
            "GATED": problem.gated,
            "BLOCKED": problem.scale_rows > 0,
            "num_warps": tile.warps,
            **dependent_launch(workspace.device),
        }
        self._programs = tile.programs(problem)
        self._scratch = (workspace.partials, workspace.arrivals)
        if tile.form == "vector":
            self._constants["ROWS"] = next(size for size in VECTOR_ROWS if size >= rows)
        else:
            self._constants |= {
                "COLUMNS": tile.columns,
                "STAGES": tile.stages,
                "SPLIT": tile.splits > 1,
                "CODES": codes,
            }

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        x_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [rows, inputs], dense -> [rows, outputs] in `dtype`, added up in float32. Shapes of scales: skinny8."""
        out = torch.empty((x.shape[0], self.problem.outputs), dtype=dtype, device=x.device)
        kernel, grid = self._kernel(x.shape[0])
        arguments, constants = self._arguments(out, x, weight, scale, bias, x_scale)
        kernel[grid](*arguments, **constants)
        return out

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        """Compile without a launch, in the threads of a triton.AsyncCompileMode if one is active."""
        kernel, grid = self._kernel(x.shape[0])
        arguments, constants = self._arguments(x.new_empty(1, dtype=dtype), x, weight, scale, None, scale)
        kernel.warmup(*arguments, grid=grid, **constants)

    def _kernel(self, rows: int) -> tuple[Any, tuple[int, ...]]:
        if self.tile.form == "vector":
            return skinny8.vector_kernel, (self._programs,)
        return skinny8.matrix_kernel, (self._programs, self.tile.splits, -(-rows // self.tile.columns))

    def _arguments(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        added = scale if bias is None else bias
        sizes = (x.shape[0], *self._sizes, scale.shape[-1], self.tile.ahead)
        constants = self._constants | {"BIAS": bias is not None}
        if self.tile.form == "vector":
            return (out, x, weight, scale, added, *sizes), constants
        constants["INTEGER"] = self._codes and weight.dtype == torch.int8
        x_scale = scale if x_scale is None else x_scale
        return (out, x, weight, scale, x_scale, added, *self._scratch, *sizes), constants
