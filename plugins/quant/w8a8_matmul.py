"""Many rows of activations, quantized, times eight-bit codes: by which kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from attrs import evolve

from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.common.launch import has_wgmma, num_sms
from engine.ops.gemm.persistent_matmul import ALIGNMENT
from engine.ops.gemm.scaled_matmul import MatmulTile, compile_matmul, matmul
from engine.ops.gemm.skinny_launch import Workspace

ROW_CLASSES = (64, 128, 256, 512, 4096)
"""Numbers of rows that a kernel is chosen for; fewer take the next one's, more the last one's."""
SOME_ROWS = 64
"""Up to so many rows tiles have as many."""
SMALL_TILES = (
    MatmulTile(rows=SOME_ROWS, outputs=32, warps=4, stages=6),
    MatmulTile(rows=SOME_ROWS, outputs=64, warps=4, stages=5),
)
MIDDLE_TILES = (
    MatmulTile(rows=128, outputs=64, warps=4, stages=6),
    MatmulTile(rows=128, outputs=128, warps=8, stages=4),
)
LARGE_TILE = MatmulTile(rows=128, outputs=256, warps=8, stages=4)
"""The fastest, or nearly, of those that benchmarks/quant_kernels.py --tune tries, on an H200."""
SHAPES = {
    64: (
        (64, 32, 4, 6), (64, 32, 4, 8), (64, 64, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6),
        (128, 32, 4, 5), (128, 64, 4, 6),
    ),
    128: (
        (64, 64, 4, 6), (64, 128, 4, 6), (128, 32, 4, 5), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4),
        (128, 128, 8, 6), (128, 256, 8, 4),
    ),
    256: (
        (64, 256, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4), (128, 128, 8, 6), (128, 256, 8, 3), (128, 256, 8, 4),
        (256, 128, 8, 3), (256, 128, 8, 4),
    ),
    512: ((128, 128, 8, 4), (128, 256, 8, 4), (256, 128, 8, 3)),
    4096: ((128, 256, 8, 4), (256, 128, 8, 3)),
}  # fmt: skip
"""Rows of x, outputs, warps and stages of the tiles to try, by class of rows."""
PERSISTENT_SHAPES = {
    64: (),
    128: ((128, 128, 8, 6),),
    256: ((128, 128, 8, 6), (128, 256, 8, 4)),
    512: ((128, 128, 8, 6), (128, 256, 8, 4), (256, 128, 8, 3)),
    4096: ((128, 256, 8, 4), (256, 128, 8, 3)),
}
"""The same of persistent tiles, where a GPU has wgmma."""
SPLITS = (2, 4)
LEAST_BLOCKS = 4
"""That each of the programs that share a tile must have."""
MOST_LANE_SUMS = 64
"""Of a tile with splits: a thread keeps its own sums in registers and reads others."""
TORCH_TILE = 128 * 128
"""From this size of a tile on torch's float8 kernel is faster than ours."""
FAST_ACCUMULATION = True
"""Whether torch's float8 kernel may add up products within the tensor cores only, with fewer digits."""
HOPPER = (9, 0)
"""From which on there is TMA, and torch's float8 kernel takes a scale a row."""


class W8A8Matmul:
    """Multiplies by the codes of one layer, as it is chosen for each number of rows."""

    def __init__(
        self, workspace: Workspace, weight_dtype: torch.dtype, outputs: int, inputs: int, dtype: torch.dtype
    ) -> None:
        """weight_dtype: float8_e4m3fn or int8; outputs, inputs: rows and columns of W; dtype: of x."""
        self.device = device = workspace.device
        self.weight_dtype = weight_dtype
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = dtype
        self.by_torch = (
            weight_dtype != torch.int8
            and dtype == torch.bfloat16
            and outputs % 16 == 0
            and has_capability(device, HOPPER)
        )
        """Whether torch has a kernel for it."""
        self.persistent = outputs % ALIGNMENT == 0 and has_wgmma(device)
        """Whether tiles may be."""
        self._workspace = workspace
        self._chosen: dict[int, MatmulTile | None] = {}

    def __call__(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [rows, inputs], dense -> [rows, outputs], in x's type.

        weights: weight (codes in the order of a CodeLayout), scale ([outputs] float32), and input_scale ([1] float32)
        where activations have a stored one.
        """
        return self.multiply(x, weights, bias, self.tile(x.shape[0]))

    def tile(self, rows: int) -> MatmulTile | None:
        """What was chosen for so many rows, else what `usual` says."""
        last = next((most for most in ROW_CLASSES if most >= rows), ROW_CLASSES[-1])
        return self._chosen[last] if last in self._chosen else self.usual(rows)

    def usual(self, rows: int) -> MatmulTile | None:
        """What is taken unmeasured; None: torch's kernel."""
        tile = matmul_tile(rows, self.outputs, num_sms(self.device))
        return None if self.by_torch and tile.rows * tile.outputs >= TORCH_TILE else tile

    def candidates(self, rows: int) -> list[MatmulTile | None]:
        """What is worth a measurement for one of ROW_CLASSES, `usual` first."""
        found = [self.usual(rows)]
        split: set[tuple[int, int]] = set()
        for tile_rows, outputs, warps, stages in SHAPES[rows]:
            tile = MatmulTile(rows=tile_rows, outputs=outputs, warps=warps, stages=stages)
            found.append(tile)
            if (tile_rows, outputs) not in split:  # once, whatever the stages
                found += splits_of(tile, rows, self.outputs, self.inputs, num_sms(self.device))
            split.add((tile_rows, outputs))
        for tile_rows, outputs, warps, stages in PERSISTENT_SHAPES[rows] if self.persistent else ():
            tile = MatmulTile(rows=tile_rows, outputs=outputs, warps=warps, stages=stages, persistent=True)
            found += [tile, *splits_of(tile, rows, self.outputs, self.inputs, num_sms(self.device))]
        return list(dict.fromkeys([*found, None] if self.by_torch else found))

    def choose(self, rows: int, tile: MatmulTile | None) -> None:
        """From now on multiply by this tile where x has so many rows, of ROW_CLASSES, or fewer, down to the class
        before; None: by torch's kernel."""
        self._chosen[rows] = tile

    def multiply(
        self,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        tile: MatmulTile | None,
    ) -> torch.Tensor:
        """As the call, with a tile of one's own."""
        codes, x_scale = quantize_rows(x, weights["weight"].dtype, scale=weights.get("input_scale"))
        return self.multiply_quantized(codes, x_scale, weights, bias, tile)

    def multiply_quantized(
        self,
        codes: torch.Tensor,
        x_scale: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        tile: MatmulTile | None,
    ) -> torch.Tensor:
        """As `multiply`, of rows as quantize_rows leaves them."""
        weight, scale = weights["weight"], weights["scale"]
        if tile is not None:
            return matmul(codes, x_scale, weight, scale, bias, self.dtype, tile, self._workspace)
        return torch._scaled_mm(
            codes,
            weight.t(),
            scale_a=x_scale[:, None],
            scale_b=scale[None, :],
            bias=bias,
            out_dtype=self.dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )

    def compile(
        self, rows: int, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, tile: MatmulTile
    ) -> None:
        """What `multiply` would launch, in the threads of a triton.AsyncCompileMode if one is active."""
        weight, scale = weights["weight"], weights["scale"]
        codes = torch.empty((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        compile_matmul(codes, scale.new_empty(rows), weight, scale, bias, self.dtype, tile, self._workspace)


def matmul_tile(rows: int, outputs: int, sms: int) -> MatmulTile:
    """The tile for a product of this size: small ones where large ones would leave multiprocessors idle."""
    if rows <= SOME_ROWS:
        return next((tile for tile in SMALL_TILES if tile.programs(rows, outputs) <= 2 * sms), SMALL_TILES[-1])
    return next((tile for tile in MIDDLE_TILES if tile.programs(rows, outputs) <= sms), LARGE_TILE)


def splits_of(tile: MatmulTile, rows: int, outputs: int, inputs: int, sms: int) -> list[MatmulTile]:
    """The same tile with splits that keep more multiprocessors busy, of all of them more than half."""
    found = []
    for splits in SPLITS:
        split = evolve(tile, splits=splits)
        programs = tile.programs(rows, outputs) * splits
        wanted = programs <= sms * tile.resident and (programs * 2 > sms or splits == SPLITS[-1])
        enough = -(-inputs // tile.block_k) >= splits * LEAST_BLOCKS
        small = tile.rows <= rows and tile.rows * tile.outputs <= MOST_LANE_SUMS * tile.warps * 32
        if wanted and enough and small and split.fits(rows, outputs):
            found.append(split)
    return found


@cache
def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a device is a GPU of at least this compute capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
