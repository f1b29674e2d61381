"""Launches of the skinny GEMM kernels: shapes, tiles, default tiles and candidates for autotuning."""

from __future__ import annotations

from typing import Literal

import torch
import triton
from attrs import evolve, field, frozen

from engine.ops.activation.act_and_mul import ACTIVATIONS
from engine.ops.common import polling
from engine.ops.common.launch import dependent_launch, has_capability, has_wgmma, num_sms
from engine.ops.gemm import few_rows, persistent_w4a16, skinny
from engine.ops.gemm.skinny_forms import FEW_ROWS_REGISTERS, FORMS, MIN_COLUMNS, VECTOR_ROWS, columns_for
from engine.ops.sampling.argmax import reduce_max

SKINNY_MAX_ROWS = 128
"""Rows of x that the skinny kernels multiply."""
HEAD_MAX_ROWS = 16
"""Rows of x that they multiply by the weights of an LM head, which the library reads as fast from there on."""
Epilogue = Literal["plain", "gated", "argmax"]
MAX_SPLITS = 16
MAX_SPLIT_TILES = 4096
"""Tiles of W that a Workspace has counters for, under split-K."""
MAX_PARTIAL_SUMS = 2**22
"""Partial sums of all programs together that a Workspace has room for, under split-K."""
MAX_POLLED_SUMS = 2**21
"""The same of sums that are polled (split_k_polling.py)."""
MAX_POLLED_SUMS_OF_TILE = 2048
"""Partial sums that are polled for one tile, with the number of programs rounded up to a power of two. With more,
counters are faster."""


@frozen(kw_only=True)
class GemmShape:
    """Shape, dtype and epilogue of a skinny GEMM."""

    epilogue: Epilogue
    """plain: x W^T. gated: act(x W_gate^T) * (x W_up^T), with the gate's rows first in W. argmax: the largest of each
    row of x W^T, rounded to dtype, and its index."""
    outputs: int
    """Rows of W; half of them when gated."""
    inputs: int
    dtype: str
    activation: str = "silu"
    """Activation of a gated GEMM; one of ACTIVATIONS."""

    def __str__(self) -> str:
        kind = self.epilogue if self.activation == "silu" else f"{self.epilogue} by {self.activation}"
        return f"{kind} {self.outputs}x{self.inputs} {self.dtype}"

    @property
    def weight_rows(self) -> int:
        """Rows of W."""
        return self.outputs * 2 if self.epilogue == "gated" else self.outputs

    @property
    def epilogue_code(self) -> int:
        """The constexpr EPILOGUE of the kernels."""
        if self.epilogue == "gated":
            return gated_epilogue(self.activation)
        return int((skinny.ARGMAX if self.epilogue == "argmax" else skinny.PLAIN).value)


def gated_epilogue(activation: str) -> int:
    """The constexpr EPILOGUE of a gated GEMM."""
    return int(skinny.GATED.value + ACTIVATIONS[activation].value)


@frozen(kw_only=True)
class SkinnyTile:
    """A tile of W, and how a program multiplies by it."""

    form: Literal["vector", "matrix", "few_rows"]
    """The kernel."""
    rows: int
    """Rows of W."""
    block_k: int
    """Columns of W; with form few_rows of each warp."""
    warps: int
    stages: int = 1
    """Software pipeline stages: tiles in shared memory, with form few_rows in registers. Not for vector."""
    splits: int = 1
    """Split-K: programs that divide the columns of one tile. Matrix only."""
    ahead: int = 0
    """Bytes of each row of W to prefetch into the L2 cache before x is written."""

    def __str__(self) -> str:
        name, more = self.form.replace("_", " "), FORMS[self.form].settings(self)
        return f"{name} {self.rows}x{self.block_k}, {self.warps} warps, {more}"

    def programs(self, shape: GemmShape) -> int:
        """Number of tiles of W."""
        return -(-shape.weight_rows // self.rows)

    def most_blocks(self, shape: GemmShape, sms: int) -> int:
        """Blocks of columns that the busiest multiprocessor reads, with one more for the start of each program."""
        share = -(-shape.inputs // (self.block_k * self.splits))
        return -(-self.programs(shape) * self.splits // sms) * (share + 1)


@frozen
class Workspace:
    """Memory for the partial sums and counters of split-K. All layers share one, as their kernels run in sequence."""

    device: torch.device
    partials: torch.Tensor = field()
    arrivals: torch.Tensor = field()
    polled_sums: torch.Tensor = field()
    """EMPTY (ops/common/polling.py) before and after each launch."""

    @property
    def supports_ptx(self) -> bool:
        """Whether the kernels' PTX runs on this device: fma.bf16x2 needs compute capability 8.0."""
        return has_capability(self.device, (8, 0))

    @property
    def polls(self) -> bool:
        """Whether split_k_polling.py can be used: on a ROCm GPU a program may not see what another one writes."""
        return self.supports_ptx or self.device.type == "cpu"

    def polled(self, splits: int, sums: int, tiles: int) -> int:
        """Number of other programs whose sums the last program of a tile polls, rounded up to a power of two.

        splits: programs per tile. sums: partial sums of each. 0: a counter says when sums are written.
        """
        if splits == 1 or not self.polls:
            return 0
        others = 1 << (splits - 2).bit_length()
        fits = tiles * (splits - 1) * sums <= MAX_POLLED_SUMS
        return others if fits and others * sums <= MAX_POLLED_SUMS_OF_TILE else 0

    @partials.default
    def _make_partials(self) -> torch.Tensor:
        return torch.empty(MAX_PARTIAL_SUMS, dtype=torch.float32, device=self.device)

    @arrivals.default
    def _make_arrivals(self) -> torch.Tensor:
        return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=self.device)

    @polled_sums.default
    def _make_polled_sums(self) -> torch.Tensor:
        room = MAX_POLLED_SUMS if self.polls else 1
        return torch.full((room,), polling.EMPTY.value, dtype=torch.int32, device=self.device)


class SkinnyLaunch:
    """A kernel for one shape and tile, ready to launch."""

    def __init__(self, shape: GemmShape, tile: SkinnyTile, rows: int, workspace: Workspace) -> None:
        """rows: the maximum; at most SKINNY_MAX_ROWS, for the vector form at most 4, for the form few_rows 8."""
        self.shape = shape
        self.tile = tile
        self._programs = tile.programs(shape)
        form = FORMS[tile.form](shape, tile, rows, workspace)
        constants = {
            "TILE": tile.rows,
            "EPILOGUE": shape.epilogue_code,
            "num_warps": tile.warps,
            **dependent_launch(workspace.device),
            **form.constants,
        }
        self._kernel = form.kernel
        self._arguments = form.arguments
        self._constants = {bias: {**constants, "BIAS": bias} for bias in (False, True)}
        self._grid = (self._programs, tile.splits)
        self._run = self._kernel[self._grid]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs] -> [rows, outputs] in x's dtype, accumulated in float32. Not for argmax."""
        out = x.new_empty((x.shape[0], self.shape.outputs))
        self._launch(out, out, x, weight, bias)
        return out

    def peaks(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest output of each row ([rows] float32, NaN if any is) and its index ([rows] int64). Argmax only.

        Outputs are compared as `__call__` of a launch with the same tile returns them, rounded to x's dtype. Of equals
        the first is taken.
        """
        shape = (x.shape[0], self._programs)
        peaks = torch.empty(shape, dtype=torch.float32, device=x.device)
        tokens = torch.empty(shape, dtype=torch.int32, device=x.device)
        self._launch(peaks, tokens, x, weight, None)
        return reduce_max(peaks, tokens)

    def compile(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Compile without a launch, as the active triton.AsyncCompileMode says."""
        out = x.new_empty(1, dtype=torch.float32 if self.shape.epilogue == "argmax" else x.dtype)
        tokens = out.new_empty(1, dtype=torch.int32) if self.shape.epilogue == "argmax" else out
        self._kernel.warmup(
            *self._arguments(out, tokens, x, weight, bias), grid=self._grid, **self._constants[bias is not None]
        )

    def _launch(self, out, tokens, x, weight, bias) -> None:
        x = x if x.is_contiguous() else x.contiguous()
        self._run(*self._arguments(out, tokens, x, weight, bias), **self._constants[bias is not None])


VECTORS = {
    1: ((4, 1024, 4), (8, 1024, 4), (4, 2048, 8), (8, 512, 2)),
    2: ((4, 1024, 4), (8, 512, 2), (4, 2048, 8)),
    4: ((4, 1024, 4), (4, 512, 2)),
}
"""(rows, block_k, warps) of the vector candidates, by rows of x. A warp has 256 columns of 16-bit numbers: a row of x
is then loaded in the tile's layout, and warps exchange data only in the final sum."""
MATRICES = {
    MIN_COLUMNS: (
        (64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (128, 64, 4, 5), (16, 256, 4, 4), (128, 64, 4, 4),
        (64, 128, 4, 3),
    ),
    64: ((64, 128, 4, 6), (32, 128, 4, 6), (64, 128, 4, 4), (128, 128, 4, 4)),
    SKINNY_MAX_ROWS: ((64, 128, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3)),
}  # fmt: skip
"""(rows, block_k, warps, stages) of the matrix candidates, by the maximum rows of x."""
FEW_ROWS = range(3, few_rows.COLUMNS.value + 1)
"""Numbers of rows of x for which tiles of the form few_rows are tried, where W has at most FEW_ROWS_MAX_WEIGHTS."""
FEW_ROWS_MAX_WEIGHTS = 2**24
FEW_MATRICES = 2
"""Number of the first MATRICES to try for up to 2 rows."""
AHEAD = (16384, 65536)
"""Bytes per program to try prefetching."""


def candidates(shape: GemmShape, rows: int, device: torch.device) -> list[SkinnyTile]:
    """Tiles to measure for a number of rows, without prefetching."""
    tiles = []
    for tile_rows, block_k, warps in VECTORS.get(rows, ()):
        if block_k < 2 * shape.inputs:
            tiles.append(SkinnyTile(form="vector", rows=tile_rows, block_k=block_k, warps=warps))
    if shape.dtype != "float32":  # tensor cores would lose digits of float32
        matrices = next(matrices for most, matrices in MATRICES.items() if rows <= most)
        for tile_rows, block_k, warps, stages in matrices[: FEW_MATRICES if rows <= 2 else None]:
            tile = SkinnyTile(form="matrix", rows=tile_rows, block_k=block_k, warps=warps, stages=stages)
            tiles += _splits(tile, shape, rows, num_sms(device))
    if _suits_few_rows(shape, rows, device):
        block_k = persistent_w4a16.SPAN.value
        for warps, stages in FEW_ROWS_REGISTERS:
            tiles.append(SkinnyTile(form="few_rows", rows=16, block_k=block_k, warps=warps, stages=stages))
    return tiles


def _suits_few_rows(shape: GemmShape, rows: int, device: torch.device) -> bool:
    """Whether tiles of the form few_rows are tried: on GPUs with wgmma, as others were not measured."""
    is_small = shape.weight_rows * shape.inputs <= FEW_ROWS_MAX_WEIGHTS and shape.inputs % 8 == 0
    has_kernel = rows in FEW_ROWS and shape.epilogue != "argmax" and shape.dtype != "float32"
    return is_small and has_kernel and has_wgmma(device)


def default_tile(shape: GemmShape, rows: int, device: torch.device) -> SkinnyTile | None:
    """The tile used where nothing was measured. None: cuBLAS."""
    sms = num_sms(device)
    if rows <= VECTOR_ROWS[-1]:
        wanted = triton.next_power_of_2(max(shape.weight_rows // (4 * sms), 1))
        block_k = min(1024, max(32, triton.next_power_of_2(shape.inputs)))
        return SkinnyTile(form="vector", rows=min(max(wanted, 4), 4 if sms > 1 else 256), block_k=block_k, warps=4)
    if shape.dtype == "float32" or rows > MIN_COLUMNS:
        return None
    return _split(SkinnyTile(form="matrix", rows=64, block_k=128, warps=4, stages=4), shape, rows, sms)


def with_ahead(tile: SkinnyTile, shape: GemmShape, itemsize: int) -> list[SkinnyTile]:
    """The same tile with prefetching, where rows of W start at multiples of 16 bytes."""
    if not FORMS[tile.form].prefetches or shape.inputs * itemsize % 16:
        return []
    most = shape.inputs * itemsize
    amounts = sorted({min(budget // tile.rows, most) for budget in AHEAD})
    return [evolve(tile, ahead=amount) for amount in amounts]


def _splits(tile: SkinnyTile, shape: GemmShape, rows: int, sms: int) -> list[SkinnyTile]:
    """The tile with the numbers of splits to try: 1.5 programs per multiprocessor, at most one, and the most even."""
    many = _split(tile, shape, rows, sms)
    one_wave = evolve(tile, splits=min(max(sms // tile.programs(shape), 1), many.splits))
    tiles = [many, one_wave]
    if tile.programs(shape) <= sms:
        possible = [evolve(tile, splits=splits) for splits in range(1, _max_splits(tile, shape, rows) + 1)]
        tiles.append(min(possible, key=lambda one: (one.most_blocks(shape, sms), one.splits)))
    return list(dict.fromkeys(tiles))


def _split(tile: SkinnyTile, shape: GemmShape, rows: int, sms: int) -> SkinnyTile:
    """The tile with as many splits as give 1.5 programs per multiprocessor, if possible."""
    programs, splits, most = tile.programs(shape), 1, _max_splits(tile, shape, rows)
    while programs * splits * 2 < sms * 3 and splits * 2 <= most:
        splits *= 2
    return evolve(tile, splits=splits)


def _max_splits(tile: SkinnyTile, shape: GemmShape, rows: int) -> int:
    """The maximum number of splits, each of at least two blocks of columns."""
    programs = tile.programs(shape)
    if shape.epilogue == "argmax" or programs > MAX_SPLIT_TILES:
        return 1  # the maximum of partial sums is not the maximum of the sums
    room = MAX_PARTIAL_SUMS // (programs * tile.rows * columns_for(rows))
    return max(min(MAX_SPLITS, shape.inputs // (2 * tile.block_k), room), 1)
