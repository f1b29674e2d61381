"""The shape of a W8A8 GEMM on a device, its candidates of tiles, and the tile for a number of rows."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from attrs import evolve, frozen

from engine.ops.activation.quantize_rows import BLOCK
from engine.ops.common.launch import has_capability, has_wgmma, num_sms, shared_memory
from engine.ops.gemm.persistent_matmul import ALIGNMENT
from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.ops.gemm.transposed_launch import TransposedTile
from engine.plugins.quant.w8a8_tiles import (
    BLOCK_SCALED_SHAPES,
    LARGE_TILE,
    MAX_ROWS_ALL_PERSISTENT,
    MEDIUM_TILES,
    PERSISTENT_CLASS,
    PERSISTENT_SHAPES,
    ROW_CLASSES,
    SHAPES,
    TRANSPOSED_TILES,
    Tile,
    matmul_tile,
    one_wave_tile,
    split_tiles,
)
from engine.plugins.quant.w8a8_waves import tile_by_waves

MIN_SCALED_MM_TILE = 128 * 128
"""From this tile size on, torch's float8 kernel is faster than ours."""
HOPPER = (9, 0)
"""From this compute capability on torch._scaled_mm takes a scale per row."""
BLOCK_SCALED_CUDA = (12, 9)
"""From this version of CUDA on, cuBLAS takes scales of blocks, on Hopper."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the compiler needs besides a tile's stages, for barriers."""
REMEMBERED = 2**13
"""Maximum number of tiles that tile_for_rows remembers, for all shapes and numbers of rows together."""


@frozen(kw_only=True, cache_hash=True)
class W8A8Shape:
    """Shape and format of a W8A8 GEMM, and what the device offers for it. Layers with equal shapes have equal tiles."""

    outputs: int
    """Rows of W."""
    inputs: int
    """Columns of W."""
    scale_rows: int
    """Outputs per scale of a block of W; 0: each output has a scale."""
    has_scaled_mm: bool
    """Whether torch's float8 kernel supports this GEMM."""
    persistent: bool
    """Whether persistent tiles can be used."""
    sms: int
    """Multiprocessors of the device."""
    shared: int
    """Bytes of shared memory for the stages of a tile."""

    @classmethod
    def on(
        cls,
        device: torch.device,
        weight_dtype: torch.dtype,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        *,
        scale_rows: int,
    ) -> W8A8Shape:
        """The shape of a layer's GEMM, and what a device offers for it.

        weight_dtype: float8_e4m3fn or int8. outputs, inputs: rows and columns of W. dtype: of x before quantization.
        scale_rows: outputs per scale of a block of W; 0: each output has a scale.
        """
        if scale_rows:
            torch_can = scale_rows == BLOCK and outputs % BLOCK == 0 and has_block_scaled_mm(device)
        else:
            torch_can = outputs % 16 == 0 and has_capability(device, HOPPER)
        return cls(
            outputs=outputs,
            inputs=inputs,
            scale_rows=scale_rows,
            has_scaled_mm=weight_dtype != torch.int8 and dtype == torch.bfloat16 and torch_can,
            persistent=not scale_rows and outputs % ALIGNMENT == 0 and has_wgmma(device),
            sms=num_sms(device),
            shared=shared_memory(device) - RESERVED_SHARED,
        )

    @property
    def one_wave(self) -> W8A8Tile | None:
        """The tile that ONE_WAVE_ROWS use instead of the one chosen for their row class. None: they use the latter."""
        return one_wave_tile(self.outputs, self.sms) if self.persistent else None

    @property
    def row_classes(self) -> tuple[int, ...]:
        """Row classes whose tiles are measured."""
        has_more = self.persistent and self.one_wave is None
        return tuple(sorted({*ROW_CLASSES, PERSISTENT_CLASS})) if has_more else ROW_CLASSES

    def default_tile(self, rows: int) -> W8A8Tile | None:
        """The tile used unless another was chosen. None: torch's kernel."""
        tile = matmul_tile(rows, self.outputs, self.sms)
        if self.scale_rows and tile is LARGE_TILE:
            tile = MEDIUM_TILES[-1]
        tile = self._fitting(tile)
        return None if self.has_scaled_mm and tile.rows * tile.outputs >= MIN_SCALED_MM_TILE else tile

    def candidates(self, rows: int) -> list[Tile]:
        """Tiles to measure for one of `row_classes`, the default first."""
        found: list[Tile] = [self.default_tile(rows)]
        split: set[tuple[int, int]] = set()
        all_persistent = self.persistent and rows <= MAX_ROWS_ALL_PERSISTENT
        shapes = () if all_persistent else (BLOCK_SCALED_SHAPES if self.scale_rows else SHAPES)[rows]
        for tile_rows, outputs, warps, stages in shapes:
            tile = self._fitting(W8A8Tile(rows=tile_rows, outputs=outputs, warps=warps, stages=stages))
            found.append(tile)
            if (tile_rows, outputs) not in split:  # once, whatever the stages
                found += split_tiles(tile, rows, self.outputs, self.inputs, self.sms)
            split.add((tile_rows, outputs))
        for tile_rows, outputs, warps, stages, block_k in PERSISTENT_SHAPES[rows] if self.persistent else ():
            tile = W8A8Tile(
                rows=tile_rows, outputs=outputs, warps=warps, stages=stages, block_k=block_k, persistent=True
            )
            found += [tile, *split_tiles(tile, rows, self.outputs, self.inputs, self.sms)]
        found += TRANSPOSED_TILES.get(rows, ()) if self.persistent else ()
        return list(dict.fromkeys([*found, None] if self.has_scaled_mm else found))

    def _fitting(self, tile: W8A8Tile) -> W8A8Tile:
        """The tile with as many stages as a multiprocessor has shared memory for, at most its own."""
        if tile.shared_memory <= self.shared:
            return tile
        return evolve(tile, stages=max(self.shared * tile.stages // tile.shared_memory, 1))


@lru_cache(maxsize=REMEMBERED)
def tile_for_rows(shape: W8A8Shape, chosen: Tile, rows: int, row_class: int) -> Tile:
    """The tile for a number of rows: `chosen`, or another one that fills waves of programs better.

    chosen: the tile of the row class. None, given or returned, is torch's kernel. Results are remembered, since all
    layers of a model ask in each step.
    """
    if isinstance(chosen, TransposedTile) or not shape.persistent or row_class <= MAX_ROWS_ALL_PERSISTENT:
        return chosen
    measured = shape.candidates(row_class)
    return tile_by_waves(chosen, rows, row_class, shape.outputs, shape.inputs, shape.sms, measured)


@cache
def has_block_scaled_mm(device: torch.device) -> bool:
    """Whether torch multiplies matrices with scales of blocks on a GPU: by cuBLAS, on Hopper alone."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return has_wgmma(device) and version >= BLOCK_SCALED_CUDA and hasattr(F, "scaled_mm")
