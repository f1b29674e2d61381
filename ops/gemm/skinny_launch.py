"""Launches of the kernels for few rows: what they multiply, how they cut it up, which cuts are worth a try."""

from __future__ import annotations

import torch
import triton
from attrs import evolve, field, frozen

from engine.ops.common.launch import dependent_launch, num_sms
from engine.ops.gemm import skinny
from engine.ops.sampling.argmax import reduce_max

MOST_ROWS = 16
VECTOR_ROWS = (1, 2, 4)
"""Rows of x that `vector` is compiled for."""
EPILOGUES = {"plain": skinny.PLAIN, "gated": skinny.GATED, "argmax": skinny.ARGMAX}
LARGE = 2**23
"""Weights from which on the next kernel is released at the end: they take some microseconds to read."""
MOST_SPLITS = 16
MOST_PROGRAMS = 4096
"""Tiles of W, where the columns of each are shared out."""
MOST_SUMS = 2**22
"""Numbers that all programs together may leave for the last of each tile."""


@frozen(kw_only=True)
class GemmShape:
    """A multiplication by one weight matrix."""

    epilogue: str
    """plain: x W^T; gated: silu(x W_gate^T) * (x W_up^T), the gate's rows first; argmax: the largest of x W^T."""
    outputs: int
    """Rows of W; half of them when gated."""
    inputs: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.epilogue} {self.outputs}x{self.inputs} {self.dtype}"

    @property
    def weight_rows(self) -> int:
        """Rows of W."""
        return self.outputs * 2 if self.epilogue == "gated" else self.outputs


@frozen(kw_only=True)
class Tile:
    """What a program takes at once."""

    form: str
    """vector or matrix."""
    rows: int
    """Of W."""
    block_k: int
    """Columns of W."""
    warps: int
    stages: int = 1
    """Tiles on their way to shared memory at once; matrix only."""
    splits: int = 1
    """Programs that share the columns of one tile; matrix only."""
    ahead: int = 0
    """Bytes of each row of W to bring into the L2 cache before x is there."""

    def __str__(self) -> str:
        more = f", {self.stages} stages, {self.splits} splits" if self.form == "matrix" else ""
        return f"{self.form} {self.rows}x{self.block_k}, {self.warps} warps{more}, {self.ahead} bytes ahead"

    def programs(self, problem: GemmShape) -> int:
        """Tiles that W has."""
        return -(-problem.weight_rows // self.rows)


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


class SkinnyLaunch:
    """One kernel for one problem and up to so many rows, ready to be launched."""

    def __init__(self, problem: GemmShape, tile: Tile, rows: int, workspace: Workspace) -> None:
        """rows: at most MOST_ROWS; for the vector form at most 4."""
        self.problem = problem
        self.tile = tile
        self._outputs = problem.outputs
        self._programs = tile.programs(problem)
        constants = {
            "TILE": tile.rows,
            "BLOCK_K": tile.block_k,
            "THREADS": tile.warps * 32,
            "EPILOGUE": EPILOGUES[problem.epilogue].value,
            "num_warps": tile.warps,
            **dependent_launch(workspace.device),
        }
        self._scratch: tuple[torch.Tensor, ...] = ()
        if tile.form == "vector":
            self._kernel = skinny.vector_kernel
            constants["ROWS"] = next(size for size in VECTOR_ROWS if size >= rows)
            constants["LATE"] = problem.weight_rows * problem.inputs >= LARGE
        else:
            self._kernel = skinny.matrix_kernel
            constants |= {"STAGES": tile.stages, "SPLIT": tile.splits > 1}
            self._scratch = (workspace.partials, workspace.arrivals)
        self._constants = {bias: {**constants, "BIAS": bias} for bias in (False, True)}
        self._grid = (self._programs, tile.splits)
        self._run = self._kernel[self._grid]
        self._sizes = (problem.outputs, problem.inputs, tile.ahead)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs] -> [rows, outputs] in x's type, added up in float32; not for argmax."""
        out = x.new_empty((x.shape[0], self._outputs))
        self._launch(out, out, x, weight, bias)
        return out

    def peaks(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest output of each row ([rows] float32, NaN if one is) and which it is ([rows] int64); argmax only.

        Outputs are compared as added up in float32, and the first of equals is taken.
        """
        shape = (x.shape[0], self._programs)
        peaks = torch.empty(shape, dtype=torch.float32, device=x.device)
        tokens = torch.empty(shape, dtype=torch.int32, device=x.device)
        self._launch(peaks, tokens, x, weight, None)
        return reduce_max(peaks, tokens)

    def compile(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Compile without a launch, in the threads of a triton.AsyncCompileMode if one is active."""
        out = x.new_empty(1, dtype=torch.float32 if self.problem.epilogue == "argmax" else x.dtype)
        tokens = out.new_empty(1, dtype=torch.int32) if self.problem.epilogue == "argmax" else out
        self._kernel.warmup(
            *self._arguments(out, tokens, x, weight, bias), grid=self._grid, **self._constants[bias is not None]
        )

    def _launch(self, out, tokens, x, weight, bias) -> None:
        x = x if x.is_contiguous() else x.contiguous()
        self._run(*self._arguments(out, tokens, x, weight, bias), **self._constants[bias is not None])

    def _arguments(self, out, tokens, x, weight, bias):
        bias = weight if bias is None else bias
        return (out, tokens, x, weight, bias, *self._scratch, x.shape[0], *self._sizes)


VECTORS = {
    1: ((4, 1024, 4), (8, 1024, 4), (4, 2048, 8), (8, 512, 2)),
    2: ((4, 1024, 4), (8, 512, 2), (4, 2048, 8)),
    4: ((4, 1024, 4), (4, 512, 2)),
}
"""rows, block_k and warps of tiles to try, by rows of x. A warp has 256 columns of 16-bit numbers: then a row of x is
loaded as the tile wants it, and warps meet only for the sum at the end."""
MATRICES = ((64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (128, 64, 4, 5), (16, 256, 4, 4))
"""rows, block_k, warps and stages."""
FEW_MATRICES = 2
"""How many of them to try for up to 2 rows."""
AHEAD = (16384, 65536)
"""Bytes a program may bring into the L2 cache in advance."""


def candidates(problem: GemmShape, rows: int, device: torch.device) -> list[Tile]:
    """Tiles worth a measurement at so many rows, without `ahead`."""
    tiles = []
    for tile_rows, block_k, warps in VECTORS.get(rows, ()):
        if block_k < 2 * problem.inputs:
            tiles.append(Tile(form="vector", rows=tile_rows, block_k=block_k, warps=warps))
    if problem.dtype != "float32":  # of which the tensor cores would drop digits
        for tile_rows, block_k, warps, stages in MATRICES[: FEW_MATRICES if rows <= 2 else None]:
            tile = Tile(form="matrix", rows=tile_rows, block_k=block_k, warps=warps, stages=stages)
            tiles.append(_split(tile, problem, num_sms(device)))
    return tiles


def default_tile(problem: GemmShape, rows: int, device: torch.device) -> Tile | None:
    """A fair tile where nothing was measured; None: leave it to the library."""
    sms = num_sms(device)
    if rows <= VECTOR_ROWS[-1]:
        wanted = triton.next_power_of_2(max(problem.weight_rows // (4 * sms), 1))
        block_k = min(1024, max(32, triton.next_power_of_2(problem.inputs)))
        return Tile(form="vector", rows=min(max(wanted, 4), 4 if sms > 1 else 256), block_k=block_k, warps=4)
    if problem.dtype == "float32":
        return None
    return _split(Tile(form="matrix", rows=64, block_k=128, warps=4, stages=4), problem, sms)


def with_ahead(tile: Tile, problem: GemmShape, itemsize: int) -> list[Tile]:
    """The same tile with weights fetched in advance, where rows of W start at multiples of 16 bytes."""
    if problem.inputs * itemsize % 16:
        return []
    most = problem.inputs * itemsize
    amounts = sorted({min(budget // tile.rows, most) for budget in AHEAD})
    return [evolve(tile, ahead=amount) for amount in amounts]


def _split(tile: Tile, problem: GemmShape, sms: int) -> Tile:
    """Columns shared out so that there is half as many programs again as multiprocessors, if that can be."""
    programs, splits = tile.programs(problem), 1
    most = min(MOST_SPLITS, problem.inputs // (2 * tile.block_k))
    if problem.epilogue == "argmax":
        most = 1  # the largest of partial sums is not the largest sum
    while programs * splits * 2 < sms * 3 and splits * 2 <= most and _fits(tile, programs, splits * 2):
        splits *= 2
    return evolve(tile, splits=splits)


def _fits(tile: Tile, programs: int, splits: int) -> bool:
    return programs <= MOST_PROGRAMS and programs * splits * tile.rows * MOST_ROWS <= MOST_SUMS
